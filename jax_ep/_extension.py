"""Why a C++ extension of the package cannot be loaded."""

from __future__ import annotations

import pathlib

_HERE = pathlib.Path(__file__).parent


def why_missing(name: str, error: ImportError, folder: pathlib.Path = _HERE) -> str:
    """For users: what keeps `jax_ep.<name>` from being loaded, and what to do.

    `python -m` and `python -c` look for packages in the working directory first. In a
    clone that finds the sources, which have no extensions, before an installed package.
    """
    why = f"the extension jax_ep.{name} cannot be loaded: {error}"
    if (folder.parent / "pyproject.toml").exists():
        why += (
            f". {folder} holds the sources: if the package is installed elsewhere, run "
            "from another directory; or install it with pip install --editable ."
        )
    return why
