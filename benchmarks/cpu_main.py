"""`python benchmarks --platform cpu`: transport `host` against plain `jax.lax`.

README.md has the method. Every case runs in a process of its own (run_case.py), on
virtual devices and with a time limit; this one collects, prints and writes.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import click
import rich.console

import bench_cases
import figure
import machine
import report
from stopwatch import Effort

_HERE = pathlib.Path(__file__).resolve().parent

# glibc: never give freed memory back, so that no page is mapped twice.
_KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_ARENA_MAX": "1",
}


@click.command()
@click.option("--quick", is_flag=True, help="Two small cases, few repeats: a test.")
@click.option(
    "--only", multiple=True, help="Cases by name or pattern, like T16-*; may repeat."
)
@click.option("--list", "list_only", is_flag=True, help="Print the cases' names.")
@click.option("--repeats", type=click.IntRange(1), help="Calls of each, at most.")
@click.option("--limit", default=900.0, show_default=True, help="Seconds per case.")
@click.option(
    "--out",
    type=click.Path(path_type=pathlib.Path, file_okay=False),
    default=_HERE / "results",
    help="Directory for the JSON file and the figure. [default: benchmarks/results]",
)
def main(
    quick: bool,
    only: tuple[str, ...],
    list_only: bool,
    repeats: int | None,
    limit: float,
    out: pathlib.Path,
) -> None:
    """Times dispatch and combine on 8 virtual CPU devices, and writes the figures.

    Exits with 1 if a result was wrong or a case failed; goals that are missed are only
    said.
    """
    cases = bench_cases.QUICK_CASES if quick else bench_cases.CASES
    cases = [c for c in cases if not only or _matches(c.name, only)]
    if list_only or not cases:
        click.echo("\n".join(case.name for case in cases) or "no case has such a name")
        return
    effort = Effort(repeats=repeats or (3 if quick else Effort.repeats))
    console = rich.console.Console(width=None if sys.stdout.isatty() else 170)
    record = _describe(effort)
    for i, case in enumerate(cases, 1):
        start = time.monotonic()
        record["cases"].append(_measure(case, effort, limit))
        seconds = time.monotonic() - start
        console.print(f"[{i}/{len(cases)}] {case.name}: {seconds:.0f} s", markup=False)
    batches = {"n_batches": 4 if quick else 40}
    record["call_overhead"] = _run_child("call_overhead.py", batches, {}, limit)
    record["machine"]["load_average_after"] = round(os.getloadavg()[0], 2)
    record["speedups"], record["bars"] = report.speedups(record), report.bars(record)
    report.print_tables(record, console)
    _write(record, out, console)
    if report.failures(record):
        sys.exit(1)


def _describe(effort: Effort) -> dict[str, Any]:
    return {
        "machine": machine.describe(),
        "command": " ".join(["python benchmarks", *sys.argv[1:]]),
        "effort": dataclasses.asdict(effort),
        "sizes": {
            "n_ranks": bench_cases.N_RANKS,
            "n_experts": bench_cases.N_EXPERTS,
            "top_k": bench_cases.TOP_K,
        },
        "cases": [],
    }


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _measure(case: bench_cases.Case, effort: Effort, limit: float) -> dict[str, Any]:
    request = {"case": dataclasses.asdict(case), "effort": dataclasses.asdict(effort)}
    environment = _KEEP_MEMORY if case.allocator == "keep" else {}
    result = _run_child("run_case.py", request, environment, limit)
    return {"name": case.name, "case": request["case"], "rows": case.n_rows, **result}


def _run_child(
    script: str, request: dict, environment: dict[str, str], limit: float
) -> dict[str, Any]:
    """What the script writes as JSON, or `{"failed": [why]}`."""
    devices = f"--xla_force_host_platform_device_count={bench_cases.N_RANKS}"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {devices}".strip(),
        **environment,
    }
    with tempfile.TemporaryDirectory() as directory:
        result = pathlib.Path(directory) / "result.json"
        command = [
            sys.executable,
            str(_HERE / script),
            json.dumps(request),
            str(result),
        ]
        try:
            subprocess.run(command, env=environment, timeout=limit, check=True)
        except subprocess.TimeoutExpired:
            return {"failed": [f"not done after {limit:g} s"]}
        except subprocess.CalledProcessError as error:
            return {"failed": [f"exit code {error.returncode}"]}
        return json.loads(result.read_text())


def _write(
    record: dict[str, Any], out: pathlib.Path, console: rich.console.Console
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"cpu_{machine.slug()}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"wrote {path}", soft_wrap=True)
    if record["speedups"]:
        path = out / "cpu_speedup.png"
        figure.draw(record, path)
        console.print(f"wrote {path}", soft_wrap=True)
