"""Runs a plan in measuring processes, and writes the record to a file after each item.

If a process hangs or crashes in an item, what it has printed is kept, and a new process continues
with the next item.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
import time
from typing import Any, Self

import machine
from plan import N_CPU_RANKS, VARIANTS, Item

_HERE = pathlib.Path(__file__).resolve().parent
_GRACE_S = 5.0
_N_REHEARSAL_RANKS = 4

Line = dict[str, Any]


class Run:
    """A run of the benchmark, with its record.

    Takes the options of the command; calls `say(item, seconds, lines)` after each item.

    Attributes:
        record: what report.py shows; README.md has the schema.
        path: the file that holds the record.
    """

    def __init__(
        self, platform, *, rehearse, limit, seconds_total, out, commit, command, say
    ) -> None:
        self._on_cpu, self._rehearses = platform == "cpu" or rehearse, rehearse
        self._limit, self._out, self._say = limit, out, say
        self._begin, self._seconds_total = time.monotonic(), seconds_total
        self.path = out
        self.record: dict[str, Any] = {
            "platform": platform,
            "command": command,
            "machine": machine.describe(),
            "cases": {},
            "results": {},
            "overheads": {},
            "failed": [],
            "not_measured": [],
        }
        if commit:
            self.record["machine"] |= {"commit": commit, "dirty": None}

    def measure(self, items: list[Item]) -> None:
        """Measures all items. On GPUs, adjacent items of the same variant share a process."""
        is_alone = self.record["platform"] == "cpu"
        groups = itertools.groupby(items, lambda i: (i.variant, is_alone and i.name))
        for _, members in groups:
            left = list(members)
            while left and self._seconds_left() > 0:
                left = self._measure_in_one_process(left)
            for item in left:
                late = f"not started within {self._seconds_total:g} s"
                self._add(item, {"not_measured": late})
        self.record["machine"]["load_average_after"] = round(os.getloadavg()[0], 2)
        self._write()

    def _seconds_left(self) -> float:
        return self._seconds_total - (time.monotonic() - self._begin)

    def _measure_in_one_process(self, items: list[Item]) -> list[Item]:
        """Measures items in one process until it ends; returns the items that are left."""
        request = {
            "platform": "cpu" if self._on_cpu else "gpu",
            "transport": "host" if self._on_cpu else "p2p",
            "items": [dataclasses.asdict(item) for item in items],
        }
        with Child(request, self._environment(items[0])) as child:
            for i, item in enumerate(items):
                begin, left = time.monotonic(), self._seconds_left()
                if i and left <= 0:
                    return items[i:]
                late = "failed" if left > self._limit else "not_measured"
                lines, ends = child.lines(min(self._limit, left), late)
                for line in lines:
                    self._add(item, line)
                self._say(item, time.monotonic() - begin, lines)
                self._write()
                if ends:
                    return items[i + 1 :]
        return []

    def _add(self, item: Item, line: Line) -> None:
        record, name = self.record, item.case.name if item.case else item.name
        ((key, value),) = line.items()
        if key == "results":
            implementation, operation, clock, figures = value
            where = f"{name}, {item.variant}" if item.variant else name
            by_operation = record[key].setdefault(where, {})
            by_clock = by_operation.setdefault(operation, {})
            by_clock.setdefault(clock, {})[implementation] = figures
        elif key == "case":
            record["cases"][name] = value
        elif isinstance(value, str):
            record[key].append(f"{item.name}: {value}")
        else:
            record[key] = record.get(key, {}) | value

    def _environment(self, item: Item) -> dict[str, str]:
        extra = VARIANTS[item.variant]
        flags = [os.environ.get("XLA_FLAGS", ""), extra.get("XLA_FLAGS", "")]
        environment = {**os.environ, **extra}
        if self._on_cpu:
            n = _N_REHEARSAL_RANKS if self._rehearses else N_CPU_RANKS
            flags.append(f"--xla_force_host_platform_device_count={n}")
            environment["JAX_PLATFORMS"] = "cpu"
        return {**environment, "XLA_FLAGS": " ".join(filter(None, flags))}

    def _write(self) -> None:
        facts = self.record["machine"]
        self.record["seconds"] = round(time.monotonic() - self._begin, 1)
        name = f"cpu_{machine.cpu_slug()}"
        if self.record["platform"] == "gpu":
            device = machine.slug(facts.get("device", "unknown"))
            name = f"gpu_{device}-x{facts.get('n_devices', 0)}"
        self._out.mkdir(parents=True, exist_ok=True)
        self.path = self._out / f"{name}.json"
        text = json.dumps(self.record).replace("}}, ", "}},\n")  # compact
        self.path.write_text(text + "\n")


class Child:
    """A measuring process, `python benchmarks --child REQUEST`: a context manager that ends it."""

    def __init__(self, request: dict[str, Any], environment: dict[str, str]) -> None:
        command = [sys.executable, str(_HERE), "--child", json.dumps(request)]
        self._process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True
        )
        self._texts: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def lines(self, seconds: float, late: str) -> tuple[list[Line], bool]:
        """Returns what an item prints within `seconds`, and whether the process ends with it.

        If that time is too short, the last line says so, under the key `late`.
        """
        deadline, lines = time.monotonic() + seconds, []
        while True:
            try:
                text = self._texts.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                return [*lines, {late: f"not done after {seconds:.0f} s"}], True
            if text is None:
                code = self._process.wait()
                return [*lines, {"failed": f"exit code {code}"}], True
            line = json.loads(text)
            if "done" in line:
                return lines, line["ends"]
            lines.append(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()

    def _read(self) -> None:
        """Queues lines that hold a JSON object; passes others, such as warnings, on to stderr."""
        for line in self._process.stdout:
            if line.startswith("{"):
                self._texts.put(line)
            else:
                sys.stderr.write(line)
        self._texts.put(None)
