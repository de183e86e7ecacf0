"""`python benchmarks --platform gpu`: the package and plain `jax.lax` on all GPUs.

README.md has the method. Needs no more than jax and NumPy; the measurements run in
processes of their own (run.py), and the file is written after each.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import itertools
import json
import os
import pathlib
import re
import time
from typing import Any

import machine
from gpu import figures, plan
from gpu.cases import Case
from gpu.child import Child

_HERE = pathlib.Path(__file__).resolve().parent.parent
_REHEARSAL_DEVICES = 4


def main(arguments: list[str]) -> int:
    """Gives the exit status: 1 if a result was wrong or a measurement failed."""
    options = _parse(arguments)
    items = plan.quick() if options.quick else plan.full()
    if options.rehearse:
        items = plan.quick(rivals=("lax all_gather",))
    items = [item for item in items if _matches(item.name, options.only)]
    if options.formats:
        items = [item for item in items if item.who in ("link", "format")]
    if options.list or not items:
        print("\n".join(i.name for i in items) or "no measurement has such a name")
        return 0
    run = Run(options)
    for _, some in itertools.groupby(items, lambda item: item.xla_flags):
        run.measure(list(some))
    print(figures.as_text(run.record), flush=True)
    return 1 if figures.failures(run.record) else 0


class Run:
    """The record, and the file that it is written to after each result."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._begin = time.monotonic()
        self.record: dict[str, Any] = {
            "machine": {**machine.describe(), **_driver()},
            "command": _command(options),
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            "sizes": {"n_experts": Case.n_experts, "top_k": Case.top_k},
            "dtype": "bfloat16",
            "results": [],
        }
        if options.commit:
            self.record["machine"] |= {"commit": options.commit, "dirty": None}

    def measure(self, items: list[plan.Item]) -> None:
        """In one process; in further ones behind an item that hangs or crashes."""
        while items:
            if self._seconds_left() <= 0:
                self._skip(items)
                return
            items = self._measure_some(items)

    def _measure_some(self, items: list[plan.Item]) -> list[plan.Item]:
        """Gives those that are left."""
        with Child(_HERE, self._request(items), self._environment(items[0])) as child:
            devices = child.next(min(self._options.limit, self._seconds_left()))
            if "failed" in devices:
                self._add(items[0], devices)
                return items[1:]
            self.record["machine"] |= devices
            for i, item in enumerate(items):
                limit = min(self._options.limit, self._seconds_left())
                if limit <= 0:
                    return items[i:]
                result = child.next(limit)
                is_last = result.pop("is_fatal", child.is_lost)
                self._add(item, result)
                if is_last:
                    return items[i + 1 :]
        return []

    def _request(self, items: list[plan.Item]) -> dict[str, Any]:
        rehearses = self._options.rehearse
        return {
            "platform": "cpu" if rehearses else "gpu",
            "transport": "host" if rehearses else "p2p",
            "effort": plan.TINY_EFFORT if rehearses or self._options.quick else None,
            "items": [dataclasses.asdict(item) for item in items],
        }

    def _environment(self, item: plan.Item) -> dict[str, str]:
        flags = [os.environ.get("XLA_FLAGS", ""), item.xla_flags]
        environment = dict(os.environ)
        if self._options.rehearse:
            environment["JAX_PLATFORMS"] = "cpu"
            n = _REHEARSAL_DEVICES
            flags.append(f"--xla_force_host_platform_device_count={n}")
        return {**environment, "XLA_FLAGS": " ".join(flags).strip()}

    def _skip(self, items: list[plan.Item]) -> None:
        limit = self._options.seconds_total
        self.record["not_measured"] = self.record.get("not_measured", []) + [
            f"{item.name}: not begun within {limit:g} s" for item in items
        ]
        self._write()

    def _add(self, item: plan.Item, result: dict[str, Any]) -> None:
        command_buffers = not item.xla_flags
        if item.who == "link":
            self.record["link"] = result
        elif item.who in ("overlap", "format"):
            parts = self.record.setdefault(f"{item.who}s", [])
            parts.append({"name": item.name, "case": item.case, **result})
        else:
            self.record["results"].append(
                {
                    "name": item.name,
                    "case": item.case,
                    "who": item.who,
                    "command_buffers": command_buffers,
                    **result,
                }
            )
        seconds = time.monotonic() - self._begin
        print(f"[{seconds:.0f} s] {item.name}: {figures.brief(result)}", flush=True)
        self._write()

    def _write(self) -> None:
        facts = self.record["machine"]
        self.record["seconds"] = round(time.monotonic() - self._begin, 1)
        self._options.out.mkdir(parents=True, exist_ok=True)
        device = re.sub(r"[^a-z0-9]+", "-", facts.get("device", "unknown").lower())
        path = self._options.out / f"gpu_{device}-x{facts.get('n_devices', 0)}.json"
        path.write_text(json.dumps(self.record, indent=1) + "\n")

    def _seconds_left(self) -> float:
        return self._options.seconds_total - (time.monotonic() - self._begin)


def _driver() -> dict[str, Any]:
    packages = ("jax-cuda13-plugin", "nvidia-cuda-runtime", "nvidia-nccl-cu13")
    versions = {name: machine.version(name) for name in packages}
    return {"driver": machine.nvidia_driver(), **versions}


def _command(options: argparse.Namespace) -> str:
    """Without what does not matter for the figures."""
    words = ["python benchmarks --platform gpu"]
    words += [
        f"--{name}"
        for name in ("quick", "rehearse", "formats")
        if getattr(options, name)
    ]
    return " ".join(words + [f"--only '{pattern}'" for pattern in options.only])


def _matches(name: str, patterns: list[str]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, p) for p in patterns)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python benchmarks --platform gpu",
        description="Times dispatch and combine on all GPUs, and writes the figures.",
    )
    add = parser.add_argument
    add("--only", action="append", default=[], help="names or patterns, like T4096-*")
    add("--formats", action="store_true", help="only dispatch in the token formats")
    add("--list", action="store_true", help="print the measurements' names")
    add("--quick", action="store_true", help="tiny sizes: a test")
    add("--rehearse", action="store_true", help="the same on virtual CPU devices")
    add("--limit", type=float, default=90, help="seconds for one measurement [90]")
    add("--seconds-total", type=float, default=1200, help="of the whole run [1200]")
    add("--commit", help="of the sources, where there is no .git")
    add(
        "--out",
        type=pathlib.Path,
        default=_HERE / "results",
        help="directory for the JSON file [benchmarks/results]",
    )
    return parser.parse_args(arguments)
