"""Describes what the figures depend on: machine, versions, commit, load. Linux only."""

import contextlib
import datetime
import importlib.metadata
import os
import pathlib
import platform
import re
import subprocess
from typing import Any

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_PACKAGES = ("jax", "jaxlib", "jax_ep", "numpy", "jax-cuda13-plugin")
_PACKAGES += ("nvidia-cuda-runtime", "nvidia-nccl-cu13")


def describe() -> dict[str, Any]:
    """Returns the facts of a run that do not depend on its devices."""
    installed = {d.name for d in importlib.metadata.distributions()}
    found = {name: importlib.metadata.version(name) for name in _PACKAGES if name in installed}
    if drivers := query_gpus("driver_version"):
        found["driver"] = drivers[0]
    changes = _git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {"python": platform.python_version(), **found},
        "commit": _git("rev-parse", "--short=10", "HEAD") or "unknown",
        "dirty": bool(changes),
        "load_average": round(os.getloadavg()[0], 2),
    }


def slug(text: str) -> str:
    """Returns `text` in a form for file names, like `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def cpu_slug() -> str:
    """Returns a name of this CPU for file names, like `amd-epyc-7763-8-cores`."""
    words = re.sub(r"\(.*?\)|@.*| CPU| [Pp]rocessor", "", _cpu_model())
    return f"{slug(words)}-{len(os.sched_getaffinity(0))}-cores"


def query_gpus(what: str) -> list[str]:
    """Returns what nvidia-smi says of each GPU; nothing without it."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    return (_output(command) or "").split()


def die_first() -> None:
    """Asks the kernel to kill this process first if memory runs out."""
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/oom_score_adj").write_text("1000")


def _cpu_model() -> str:
    text = pathlib.Path("/proc/cpuinfo").read_text()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    return found.group(1) if found else platform.processor() or "unknown CPU"


def _git(*args: str) -> str | None:
    return _output(["git", *args])


def _output(command: list[str]) -> str | None:
    """The output of a command; None if it fails or is not there."""
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
