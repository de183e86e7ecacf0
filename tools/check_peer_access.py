"""Finds code of kernels that reaches other ranks past the files that are there for it.

Usage: check_peer_access.py FOLDER, the one that holds `ffi`. Prints each place, and fails if there
is one. `make lint-peers` runs it.
"""

import pathlib
import re
import sys

_PEER = "ffi/p2p/device/peer.cuh"
_NETWORK = "ffi/nvshmem/kernels/network.cuh"
# Patterns, and the files and folders that may have them; others belong into the first one.
_RULES = {
    "access of system scope": (
        r"thread_scope_system|\w_system\s*\(|\b(?:st|ld|red|atom|fence)[._][\w.:]*[._]sys\b",
        # Also: a word in host memory; the instructions themselves; the fence before a put.
        (_PEER, "ffi/p2p/device/call_state.cuh", "ffi/p2p/device/ptx.cuh", _NETWORK),
    ),
    "volatile access": (r"\b(?:st|ld)\.(?:volatile|mmio)\b|(?<!asm )\bvolatile\b", (_PEER,)),
    "multicast": (r"\bmultimem\b", (_PEER,)),
    "address in a peer's memory": (r"\bpeers?(?:\[[^]]*\])?\.heap\s*[+\[]", (_PEER,)),
    "call of NVSHMEM": (r"\bnvshmemx?_\w|<nvshmemx?\.h>", (_NETWORK, "ffi/nvshmem/world/")),
}


def violations(root: pathlib.Path) -> list[str]:
    """`FILE:LINE: what it is` for each, in all files that kernels are compiled from."""
    found = []
    for path in sorted((root / "ffi").rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.suffix not in (".cu", ".cuh", ".h") or name.startswith("ffi/tests/"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            code = line.split("//")[0]
            for what, (pattern, allowed) in _RULES.items():
                if re.search(pattern, code) and not name.startswith(allowed):
                    found.append(f"{name}:{number}: {what}; it belongs into {allowed[0]}")
    return found


if __name__ == "__main__":
    places = violations(pathlib.Path(sys.argv[1]))
    print("\n".join(places), end="\n" if places else "")
    sys.exit(bool(places))
