# SPDX-License-Identifier: Apache-2.0
"""Prints what pip must install before the package is built without isolation.

Usage: python tools/requirements.py EXTRA...
       python tools/requirements.py --cuda [JAX_EP_CUDA]
       python tools/requirements.py --cuda-toolkit [JAX_EP_CUDA]

These are the build requirements, the package's dependencies and those of the extras, from
pyproject.toml. The build requirement on jaxlib is left out, so the extension is built against the
jaxlib that it runs with. (Wheels are built with isolation, against the oldest supported jaxlib.)

The CUDA kernels also need what --cuda prints, to be installed without its dependencies, and what
--cuda-toolkit prints, with them. Both print nothing if the kernels are not built on this machine,
the latter also if there is an nvcc. JAX_EP_CUDA is AUTO (the default), ON or OFF.
"""

import re
import sys
import tomllib
from pathlib import Path

import cuda_compiler


def main() -> None:
    """Prints one requirement per line."""
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    pyproject = tomllib.loads(text)
    if sys.argv[1].startswith("--"):
        print(*cuda_requirements(*sys.argv[1:]), sep="\n")
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


def cuda_requirements(option: str, mode: str = "") -> list[str]:
    """The requirements that --cuda or --cuda-toolkit prints."""
    settings = {"cmake.define.JAX_EP_CUDA": mode or "AUTO"}
    needed = cuda_compiler.requirements(settings)
    toolkit = cuda_compiler.dependency_group("cuda-toolkit")
    return [r for r in needed if (r in toolkit) == (option == "--cuda-toolkit")]


if __name__ == "__main__":
    main()
