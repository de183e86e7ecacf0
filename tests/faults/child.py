"""Runs a fault script's second half in a process of its own, which may crash or hang.

The script calls `run`; its child is the same script with the arguments `--child ...`.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

# With a sanitizer; see tests/sanitizers/run.sh.
SLOWDOWN = 4 if "san.so" in os.environ.get("LD_PRELOAD", "") else 1
SLACK_S = 8.0 * SLOWDOWN  # of times that a busy machine stretches
# This interpreter with its options: without them, a child would find an editable install first.
PYTHON = (sys.executable, *["-S"] * sys.flags.no_site, *["-P"] * sys.flags.safe_path)


def arguments() -> argparse.Namespace:
    """`quick`, a flag; `child`, the arguments of the child, or None in the script itself."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="run a sample, in at most 20 s")
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser.parse_args()


def start(script: str, *args: str) -> subprocess.Popen:
    """Starts the child, with one stream of output."""
    return subprocess.Popen(
        [*PYTHON, script, "--child", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(script: str, *args: str, timeout_s: float) -> int:
    """Runs the child; returns the number of faults that it tells.

    Exits with the child's log if it crashes, fails or hangs.
    """
    timeout_s *= SLOWDOWN
    process = start(script, *args)
    try:
        log, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # faulthandler prints where it hangs
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        sys.exit(f"{process.communicate()[0]}\n{script}: hung for {timeout_s:.0f} s; log above")
    return n_faults(script, process.returncode, log)


def n_faults(script: str, status: int, log: str) -> int:
    """The number of faults that the log tells; exits with the log if the child failed."""
    if status != 0:
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        sys.exit(f"{log}\n{script}: the child ended with {how}; log above")
    found = re.search(r"^(\d+) faults$", log, re.MULTILINE)
    if found is None:
        sys.exit(f"{log}\n{script}: the child ended early; log above")
    return int(found.group(1))


@contextlib.contextmanager
def at_most(seconds: float, what: str) -> Iterator[None]:
    """Fails if the body takes longer, a busy machine allowed for."""
    begin = time.monotonic()
    yield
    took = time.monotonic() - begin
    assert took < seconds + SLACK_S, f"{what} took {took:.1f} s, more than {seconds} s"
