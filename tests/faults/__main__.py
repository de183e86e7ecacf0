"""Runs the package against faults: `python tests/faults [--quick] [NAME...]`.

Each script of the table is a program of its own, which ends with status 0 and the line `NAME: N
faults, no crash, no hang` if all is as it must be. The log of one that fails is printed.
"""

import argparse
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

FOLDER = pathlib.Path(__file__).parent
# This interpreter with its options: without them, a script would find an editable install first.
PYTHON = (sys.executable, *["-S"] * sys.flags.no_site, *["-P"] * sys.flags.safe_path)

# Script: the seconds that it may take. With --quick, each takes a few.
SCRIPTS = {
    "threads": 300,
    "allocations": 600,
    "pauses": 300,
    "opening": 400,
    "tampered": 300,
    "changing": 300,
    "malformed": 600,
    "pickles": 120,
}


def command(name: str, *, quick: bool) -> list[str]:
    """Runs one script."""
    return [*PYTHON, str(FOLDER / f"{name}.py"), *["--quick"] * quick]


def run(name: str, *, quick: bool = False) -> int:
    """Runs one script; returns its number of faults.

    Raises:
        AssertionError: it failed or hung; the text holds its log.
    """
    limit_s = SCRIPTS[name]
    process = subprocess.Popen(
        command(name, quick=quick),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that none of its processes outlives it
    )
    try:
        log, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        log, _ = process.communicate()
        raise AssertionError(f"{log}\n{name} did not end within {limit_s} s; log above") from None
    closing = re.search(rf"^{name}: (\d+) faults, no crash, no hang$", log, re.MULTILINE)
    if process.returncode != 0 or closing is None:
        raise AssertionError(f"{log}\n{name} ended with status {process.returncode}; log above")
    return int(closing.group(1))


def main() -> None:
    """Runs the scripts that the command line names, or all."""
    parser = argparse.ArgumentParser(prog="python tests/faults", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a sample of each script's faults")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SCRIPTS)}")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(SCRIPTS):
        parser.error(f"NAME must be one of {', '.join(SCRIPTS)}; got {', '.join(sorted(unknown))}")
    names, total, failed = arguments.names or list(SCRIPTS), 0, []
    for name in names:
        begin = time.monotonic()
        try:
            n_faults = run(name, quick=arguments.quick)
            total += n_faults
            result = f"{n_faults} faults, no crash, no hang"
        except AssertionError as error:
            print(error)
            failed.append(name)
            result = "FAILED"
        print(f"{name}: {result} ({time.monotonic() - begin:.0f} s)", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
    print(f"total: {total} faults in {len(names)} scripts, no crash, no hang")


if __name__ == "__main__":
    main()
