"""Checks which folders of ffi/ include and name which others: `python3 tools/check_layers.py`.

Python has import-linter for this; C++ has the tables below. Modules and tests may use everything.
"""

import pathlib
import re
import sys

_P2P_KERNELS = ("p2p/dispatch", "p2p/combine", "p2p/combine_grad", "p2p/copies", "p2p/balance")

# What a folder's files may include, besides those of the folder itself: files of these folders. A
# folder without a line of its own stands for the folders in it. There are no other folders.
MAY_INCLUDE = {
    "core": (),
    "xla": ("core",),
    "host": ("core", "xla", "tests"),  # tests/failing_calls.h, in builds for tests
    "p2p/launch": ("core",),
    "p2p/device": ("core", "p2p/launch"),
    "p2p/dispatch": ("core", "p2p/launch", "p2p/device"),
    "p2p/dispatch_ll": ("core", "p2p/launch", "p2p/device", "p2p/dispatch"),
    "p2p/combine": ("core", "p2p/launch", "p2p/device"),
    "p2p/combine_ll": ("core", "p2p/launch", "p2p/device", "p2p/combine"),
    "p2p/combine_grad": ("core", "p2p/launch", "p2p/device"),
    "p2p/copies": ("core", "p2p/launch", "p2p/device"),
    "p2p/balance": ("core", "p2p/launch", "p2p/device"),
    "p2p/open": ("core", "p2p/launch", *_P2P_KERNELS),
    "p2p/call": ("core", "xla", "p2p/launch", *_P2P_KERNELS, "p2p/open"),
    "layer/activation": ("core", "xla", "host", "p2p"),
    "layer/matmul": ("core", "layer/activation"),
    "layer/matmul/ampere": ("core", "p2p/launch", "p2p/device", "layer/matmul"),
    "layer/matmul/hopper": ("core", "p2p/launch", "p2p/device", "layer/activation", "layer/matmul"),
    "layer/matmul/call": ("core", "xla", "p2p", "layer/activation", "layer/matmul"),
    "nvshmem/plan": ("core", "p2p"),
    "nvshmem/steps": ("core", "p2p", "nvshmem/plan"),
    "nvshmem/kernels": ("core", "p2p", "nvshmem/plan", "nvshmem/steps"),
    "nvshmem/world": ("core", "p2p", "nvshmem/plan"),
    "nvshmem/call": ("core", "xla", "p2p", "nvshmem/plan", "nvshmem/world"),
    "modules": ("core", "xla"),  # the headers; MODULES may include everything
}
MODULES = ("modules/host.cc", "modules/cuda.cc", "modules/nvshmem.cc", "modules/nvshmem.h")

# What no other folder names, not even in a comment.
NAMES = {
    "nvshmem": re.compile(r"nvshmem|\b[Rr]ail|[a-z]Rail"),
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
        if folder not in MAY_INCLUDE:
            problems.append(f"ffi/{name}:1: {folder}/ has no layer in tools/check_layers.py")
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            for problem in _problems_of_line(root, folder, line):
                problems.append(f"ffi/{name}:{number}: {problem}")
    return problems


def _problems_of_line(root: pathlib.Path, folder: str, line: str) -> list[str]:
    include = INCLUDE.match(line)
    if include and (root / include[1]).is_file():  # not a library's
        target = include[1].rpartition("/")[0]
        allowed = (folder, *MAY_INCLUDE[folder])
        if not any(_covers(other, target) for other in allowed):
            return [f"{folder}/ must not include {include[1]}"]
    return [
        f"{folder}/ must not name what is of {feature}/: {line.strip()}"
        for feature, pattern in NAMES.items()
        if not _is_in(folder, feature) and pattern.search(line)
    ]


def _covers(entry: str, folder: str) -> bool:
    return folder == entry if entry in MAY_INCLUDE else _is_in(folder, entry)


def _is_in(folder: str, other: str) -> bool:
    return folder == other or folder.startswith(f"{other}/")


if __name__ == "__main__":
    sys.exit(main())
