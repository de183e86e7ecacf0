"""Checks which folders of ffi/ include and name which others: `python3 tools/check_layers.py`.

Python has import-linter for this; C++ has the tables below. Modules and tests may use everything.
"""

import pathlib
import re
import sys

# What a folder's files may include, besides those of the folder itself: files of these folders and
# of the folders in them. There are no other folders.
MAY_INCLUDE = {
    "core": (),
    "xla": ("core",),
    "cpu": ("core", "xla"),
    "cuda/call": ("core",),
    "cuda/device": ("core", "cuda/call"),
    "cuda/dispatch": ("core", "cuda/call", "cuda/device"),
    "cuda/combine": ("core", "cuda/call", "cuda/device"),
    "cuda/group": ("core", "cuda/call", "cuda/dispatch", "cuda/combine"),
    "cuda/handlers": ("core", "xla", "cuda/call", "cuda/dispatch", "cuda/combine", "cuda/group"),
    "layer/silu": ("core", "xla", "cpu", "cuda"),
    "layer/matmul": ("core", "xla", "cuda", "layer/silu"),
    "internode/plan": ("core", "cuda"),
    "internode/steps": ("core", "cuda", "internode/plan"),
    "internode/device": ("core", "cuda", "internode/plan"),
    "internode/kernels": ("core", "cuda", "internode/plan", "internode/steps", "internode/device"),
    "internode/nvshmem": ("core", "cuda", "internode/plan"),
    "internode/handlers": ("core", "xla", "cuda", "internode/plan", "internode/nvshmem"),
}
MODULES = ("module.cc", "cuda_module.cc")
OF_MODULES = ("core", "xla")  # what the headers beside them may include

# What no other folder names, not even in a comment.
NAMES = {
    "internode": re.compile(r"(?<!jax_ep/)internode/|nvshmem|\b[Rr]ail|[a-z]Rail"),
    "layer": re.compile(r"silu|matmul", re.IGNORECASE),
}

INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"')
SUFFIXES = (".h", ".cc", ".cuh", ".cu")


def main() -> int:
    """Prints the problems; the exit status."""
    problems = find_problems(pathlib.Path(__file__).parents[1] / "ffi")
    print("\n".join(problems) or "check_layers: ffi/ follows its layers")
    return 1 if problems else 0


def find_problems(root: pathlib.Path) -> list[str]:
    """`file:line: problem` for all files in `root`, which is ffi/ or a copy of it."""
    problems = []
    for path in sorted(p for p in root.rglob("*") if p.suffix in SUFFIXES):
        name = path.relative_to(root).as_posix()
        if name in MODULES or name.startswith("tests/"):
            continue
        folder = name.rpartition("/")[0]
        if folder and folder not in MAY_INCLUDE:
            problems.append(f"ffi/{name}:1: {folder}/ has no layer in tools/check_layers.py")
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            for problem in _problems_of_line(root, folder, line):
                problems.append(f"ffi/{name}:{number}: {problem}")
    return problems


def _problems_of_line(root: pathlib.Path, folder: str, line: str) -> list[str]:
    here = f"{folder}/" if folder else "a header of the modules"
    include = INCLUDE.match(line)
    if include and (root / include[1]).is_file():  # not a library's
        target = include[1].rpartition("/")[0]
        allowed = (folder, *MAY_INCLUDE.get(folder, OF_MODULES))
        if not any(_is_in(target, other) for other in allowed):
            return [f"{here} must not include {include[1]}"]
    return [
        f"{here} must not name what is of {feature}/: {line.strip()}"
        for feature, pattern in NAMES.items()
        if not _is_in(folder, feature) and pattern.search(line)
    ]


def _is_in(folder: str, other: str) -> bool:
    return folder == other or folder.startswith(f"{other}/")


if __name__ == "__main__":
    sys.exit(main())
