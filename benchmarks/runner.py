"""Runs a plan in measuring processes, and writes the record to a file after each item.

If a process hangs or crashes in an item, what it has printed is kept, and a new process continues
with the next item.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import queue
import socket
import subprocess
import sys
import threading
import time
from typing import Any, Self

import machine
import records
from implementations import XLA_BETWEEN
from plan import N_CPU_RANKS, VARIANTS, Item

_HERE = pathlib.Path(__file__).resolve().parent
_GRACE_S = 5.0
_N_REHEARSAL_RANKS = 4
_SHARING = "CUDA_VISIBLE_DEVICES=0,0 names one for both of two"

Line = dict[str, Any]


class Run:
    """A run of the benchmark, with its record.

    Takes the options of the command; calls `say(item, seconds, lines)` after each item.

    Attributes:
        record: what report.py shows.
        path: the file that holds the record.
    """

    def __init__(
        self, platform, *, rehearse, limit, seconds_total, out, commit, command, say
    ) -> None:
        self._on_cpu, self._rehearses = platform == "cpu" or rehearse, rehearse
        self._limit, self._out, self._say = limit, out, say
        self._begin, self._seconds_total = time.monotonic(), seconds_total
        self.path = out
        facts = {"platform": platform, "command": command, "device": "unknown", "n_devices": 0}
        self.record = records.Run(facts | machine.describe())
        if commit:
            self.record.facts |= {"commit": commit, "dirty": None}

    def measure(self, items: list[Item]) -> None:
        """Measures all items. On GPUs, adjacent items of the same variant share processes."""
        is_alone = self.record.facts["platform"] == "cpu"
        groups = itertools.groupby(items, lambda i: (i.variant, i.n_processes, is_alone and i.name))
        for _, members in groups:
            left = list(members)
            while left and self._seconds_left() > 0:
                left = self._measure_together(left)
            for item in left:
                late = f"not started within {self._seconds_total:g} s"
                self._add(item, {"not_measured": late})
        self._write()

    def _seconds_left(self) -> float:
        return self._seconds_total - (time.monotonic() - self._begin)

    def _measure_together(self, items: list[Item]) -> list[Item]:
        """Measures items in the same processes until these end; returns the items that are left."""
        n_processes, gpus = items[0].n_processes, self._gpus_of_job(items[0])
        if len(gpus) < n_processes:
            for item in items:
                self._add(item, {"not_measured": f"needs {n_processes} GPUs; {_SHARING}"})
            return []
        if len(set(gpus)) < len(gpus) and not self._on_cpu:
            items = [self._without_collectives(item) for item in items]
        request = {
            "platform": "cpu" if self._on_cpu else "gpu",
            "transport": "host" if self._on_cpu else "p2p",
            "items": [dataclasses.asdict(item) for item in items],
        }
        with Children(request, self._environments(items[0], gpus)) as child:
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

    def _gpus_of_job(self, item: Item) -> list[str]:
        """The GPU of each process of a job; on CPUs, and of a process that has all, ""."""
        if item.n_processes == 1 or self._on_cpu:
            return [""] * item.n_processes
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = machine.query_gpus("index") if given is None else filter(None, given.split(","))
        return list(gpus)[: item.n_processes]

    def _without_collectives(self, item: Item) -> Item:
        if XLA_BETWEEN in item.implementations:
            why = f"{XLA_BETWEEN}: NCCL does not serve processes that share a GPU"
            self._add(item, {"not_measured": why})
        left = tuple(name for name in item.implementations if name != XLA_BETWEEN)
        return dataclasses.replace(item, implementations=left)

    def _add(self, item: Item, line: Line) -> None:
        record, name = self.record, item.case.name if item.case else item.name
        ((key, value),) = line.items()
        if isinstance(value, str):
            record.add(key, {"item": item.name, "why": value})
        elif key == "times":
            record.add(key, {"case": name, "variant": item.variant or None} | value)
        elif key != "run":
            if value not in record.rows(key):  # a case may be of several items
                record.add(key, value)
        elif record.facts["n_devices"] < value["n_devices"]:
            record.facts |= value

    def _environments(self, item: Item, gpus: list[str]) -> list[dict[str, str]]:
        """The environment of each process."""
        extra = VARIANTS[item.variant]
        flags = [os.environ.get("XLA_FLAGS", ""), extra.get("XLA_FLAGS", "")]
        environment = {**os.environ, **extra}
        if self._on_cpu:
            n = _N_REHEARSAL_RANKS if self._rehearses else N_CPU_RANKS
            n //= item.n_processes
            flags.append(f"--xla_force_host_platform_device_count={n}")
            environment["JAX_PLATFORMS"] = "cpu"
        environment["XLA_FLAGS"] = " ".join(filter(None, flags))
        share = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        return [environment | ({"CUDA_VISIBLE_DEVICES": g} | share if g else {}) for g in gpus]

    def _write(self) -> None:
        facts = self.record.facts
        facts["seconds"] = round(time.monotonic() - self._begin, 1)
        name = f"cpu_{machine.cpu_slug()}"
        if facts["platform"] == "gpu":
            name = f"gpu_{machine.slug(facts['device'])}-x{facts['n_devices']}"
        self._out.mkdir(parents=True, exist_ok=True)
        self.path = self._out / f"{name}.jsonl"
        records.write(self.path, [self.record])


class Children(contextlib.ExitStack):
    """The measuring processes of a request, one for each environment; see `Child`."""

    def __init__(self, request: dict[str, Any], environments: list[dict[str, str]]) -> None:
        super().__init__()
        n = len(environments)
        jobs: list[dict[str, Any]] = [{}]
        if n > 1:
            address = f"localhost:{_free_port()}"
            jobs = [{"job": [address, n, i]} for i in range(n)]
        pairs = zip(jobs, environments, strict=True)
        self._all = [self.enter_context(Child(request | job, each)) for job, each in pairs]

    def lines(self, seconds: float, late: str) -> tuple[list[Line], bool]:
        """Returns what `Child.lines` does of the first, and what failed in the others."""
        lines, ends = self._all[0].lines(seconds, late)
        return lines + [line for child in self._all[1:] for line in child.failures()], ends


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


class Child:
    """A measuring process, `python benchmarks --child REQUEST`: a context manager that ends it."""

    def __init__(self, request: dict[str, Any], environment: dict[str, str]) -> None:
        command = [sys.executable, str(_HERE), "--child", json.dumps(request)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=environment, stdout=pipe, text=True)
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

    def failures(self) -> list[Line]:
        """Returns what has failed so far, without waiting."""
        texts = []
        with contextlib.suppress(queue.Empty):
            while text := self._texts.get_nowait():
                texts.append(text)
        failed = [line for line in map(json.loads, texts) if "failed" in line]
        code = self._process.poll()
        return [*failed, {"failed": f"exit code {code}"}] if code else failed

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
