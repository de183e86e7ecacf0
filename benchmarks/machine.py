"""What the numbers depend on: machine, versions, commit, load."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import pathlib
import platform
import re
import subprocess
from typing import Any

from memory import total_bytes

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_NOT_RESULTS = ":!benchmarks/results"


def describe() -> dict[str, Any]:
    """Facts for the results file."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(total_bytes() / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("jax", "jaxlib", "jax_ep", "numpy")},
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--", ".", _NOT_RESULTS)),
        "load_average": round(os.getloadavg()[0], 2),
    }


def slug() -> str:
    """For file names, like `amd-epyc-7763-8-cores`."""
    words = re.sub(r"\(.*?\)|@.*| CPU| [Pp]rocessor", "", cpu_model())
    words = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
    return f"{words}-{len(os.sched_getaffinity(0))}-cores"


def cpu_model() -> str:
    """As /proc/cpuinfo names it."""
    match = re.search(
        r"^model name\s*:\s*(.+)$", pathlib.Path("/proc/cpuinfo").read_text(), re.M
    )
    return match.group(1) if match else platform.processor() or "unknown CPU"


def nvidia_driver() -> str | None:
    """Its version."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split("\n")[0] or None


def version(package: str) -> str | None:
    """Of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*args: str) -> str | None:
    try:
        done = subprocess.run(["git", *args], cwd=_ROOT, capture_output=True, text=True)
    except OSError:  # there is no git
        return None
    return done.stdout.strip() if done.returncode == 0 else None
