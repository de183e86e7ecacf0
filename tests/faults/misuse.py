"""Shared by the scripts that misuse Python calls: faults by name, each of which must be refused."""

import argparse
import faulthandler
import sys
from collections.abc import Callable
from typing import Any

FAULT_LIMIT_S = 120  # of one fault, on a slow machine; longer is a hang, which ends the process


def run(
    name: str,
    faults: dict[str, Callable[[], Any]],
    check: Callable[[str, BaseException | None, Any], str | None],
    works: Callable[[], None],
) -> None:
    """Commits every fault and exits; a crash of the process is a failure by itself.

    Args:
        name: of the script.
        faults: by name.
        check: (name, error or None, result) -> what is wrong, or None.
        works: a right use, which must work before, between and after the faults.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a sample of the faults")
    is_quick = parser.parse_args().quick
    names = list(faults)[:: max(1, len(faults) // 25)] if is_quick else list(faults)
    wrong = []
    works()
    for i, each in enumerate(names):
        faulthandler.dump_traceback_later(FAULT_LIMIT_S, exit=True)
        error, result = None, None
        try:
            result = faults[each]()
        except Exception as caught:
            error = caught
        faulthandler.cancel_dump_traceback_later()
        why = check(each, error, result)
        if why is not None:
            wrong.append(f"{each}: {why}")
        if i % 50 == 49:
            works()
    works()
    if wrong:
        sys.exit("\n".join([*wrong, f"{name}: {len(wrong)} of {len(names)} faults not refused"]))
    print(f"{name}: {len(names)} faults, no crash, no hang")
