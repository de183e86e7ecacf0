# SPDX-License-Identifier: Apache-2.0
"""Prints what pip must install before the package is built without isolation.

Usage: python tools/requirements.py EXTRA...
       python tools/requirements.py --group NAME

These are the build requirements, the package's dependencies and those of the extras, from
pyproject.toml. The build requirement on jaxlib is left out, so the extension is built against the
jaxlib that it runs with. (Wheels are built with isolation, against the oldest supported jaxlib.)

With --group, instead a dependency group alone: `cuda-build`, to be installed without its own
dependencies, or `docs`.
"""

import re
import sys
import tomllib
from pathlib import Path


def main() -> None:
    """Prints one requirement per line."""
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    pyproject = tomllib.loads(text)
    if sys.argv[1:2] == ["--group"]:
        print(*pyproject["dependency-groups"][sys.argv[2]], sep="\n")
        return
    project = pyproject["project"]
    own_extras = re.compile(rf"{project['name']}\[([\w,-]+)\]")

    def extra(name: str) -> list[str]:
        requirements = []
        for requirement in project["optional-dependencies"][name]:
            own = own_extras.fullmatch(requirement)
            names = own[1].split(",") if own else []
            requirements += [r for n in names for r in extra(n)]
            requirements += [] if own else [requirement]
        return requirements

    requirements = pyproject["build-system"]["requires"]
    requirements = [r for r in requirements if not r.startswith("jaxlib")]
    requirements += project["dependencies"]
    for name in sys.argv[1:]:
        requirements += extra(name)
    print(*dict.fromkeys(requirements), sep="\n")


if __name__ == "__main__":
    main()
