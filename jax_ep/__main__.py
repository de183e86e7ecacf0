"""`python -m jax_ep`: the command line of jax_ep/cli."""

import sys


def main() -> None:
    """Runs the command line, or says which package it lacks."""
    try:
        from jax_ep.cli import main as run
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        sys.exit(
            f"python -m jax_ep needs {error.name}, which is not installed: pip install "
            "'jax_ep[cli]'."
        )
    run(prog_name="python -m jax_ep")


if __name__ == "__main__":
    main()
