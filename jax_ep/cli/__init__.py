"""The command line: `python -m jax_ep doctor` and `bench`. Needs the extra `cli`."""

import click

from jax_ep.cli import bench, doctor

__all__ = ["main"]


@click.group(
    commands=[bench.bench, doctor.doctor], context_settings={"help_option_names": ["-h", "--help"]}
)
def main() -> None:
    """Expert parallelism for JAX: what works on this machine, and how fast."""
