"""`python benchmarks`: what fits this machine, the CPU's or the GPUs' benchmark.

Options that come before all others:

    --platform cpu|gpu   instead of what JAX has here
    --report FILE        no measurement: what a file of GPU figures says
    --format FORMAT      of the report: markdown (the default), table, figure

README.md has the rest.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys

_FIND_PLATFORM = "import jax; print(jax.default_backend())"


def main() -> int:
    if sys.argv[1:2] == ["--measure-gpu"]:  # a process that gpu/main.py has started
        from gpu import run

        run.main(json.loads(sys.argv[2]))
        return 0
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--platform", choices=("cpu", "gpu"))
    parser.add_argument("--report", type=pathlib.Path)
    parser.add_argument(
        "--format", choices=("markdown", "table", "figure"), default="markdown"
    )
    options, rest = parser.parse_known_args()
    if options.report:
        from gpu import report

        report.show(options.report, options.format)
        return 0
    if (options.platform or _platform()) == "gpu":
        from gpu import main

        return main.main(rest)
    import cpu_main

    return cpu_main.main(rest, prog_name="python benchmarks")


def _platform() -> str:
    """JAX's default, found in another process: one that looks holds the GPUs' memory.

    A JAX that finds no device at all says so in the process that needs one.
    """
    command = [sys.executable, "-c", _FIND_PLATFORM]
    done = subprocess.run(command, capture_output=True, text=True)
    return "gpu" if done.stdout.strip() in ("gpu", "cuda") else "cpu"


if __name__ == "__main__":
    sys.exit(main())
