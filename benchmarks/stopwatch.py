"""Interleaved timing: one call of each contestant in turn, so that noise hits all."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

_IDLE_S = 5e-3
_LONGEST_SETTLING_S = 2.0


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        repeats: calls of each contestant, at most.
        seconds: of each contestant; then it stops, with fewer calls.
        min_repeats: calls even of a slow one.
    """

    repeats: int = 60
    seconds: float = 6.0
    min_repeats: int = 3


@dataclasses.dataclass
class Samples:
    """Wall and CPU seconds of one contestant's calls."""

    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)

    def wants_more(self, effort: Effort) -> bool:
        n, spent = len(self.wall), sum(self.wall)
        if n < min(effort.min_repeats, effort.repeats):
            return True
        return n < effort.repeats and spent < effort.seconds

    def summary(self) -> dict[str, float | int]:
        """Milliseconds."""
        quartiles = np.percentile(self.wall, [0, 25, 50, 75, 100]) * 1e3
        names = ("min_ms", "p25_ms", "median_ms", "p75_ms", "max_ms")
        result = {
            name: round(float(value), 4)
            for name, value in zip(names, quartiles, strict=True)
        }
        cpu = round(float(np.median(self.cpu)) * 1e3, 4)
        return {**result, "median_cpu_ms": cpu, "n": len(self.wall)}


def measure(
    calls: dict[str, tuple[Callable, Sequence[Any]]], effort: Effort
) -> dict[str, Samples]:
    """Times each `function(*args)` until its results are ready, warm-up apart.

    The order of the contestants rotates. Results are freed before the next call.
    """
    samples = {name: Samples() for name in calls}
    for function, args in calls.values():
        jax.block_until_ready(function(*args))
    gc.collect()
    turn = 0
    while True:
        waiting = [name for name in calls if samples[name].wants_more(effort)]
        if not waiting:
            return samples
        first = turn % len(waiting)
        for name in waiting[first:] + waiting[:first]:
            _measure_once(*calls[name], samples[name])
        turn += 1


def _measure_once(function: Callable, args: Sequence[Any], samples: Samples) -> None:
    _wait_until_idle()
    cpu, wall = time.process_time(), time.perf_counter()
    results = jax.block_until_ready(function(*args))
    samples.wall.append(time.perf_counter() - wall)
    samples.cpu.append(time.process_time() - cpu)
    del results


def _wait_until_idle() -> None:
    """Lets the last call's work end.

    XLA reports the results before it has freed temporary arrays. Unmapping hundreds of
    megabytes takes tens of milliseconds, which would fall on the next contestant.
    """
    deadline = time.monotonic() + _LONGEST_SETTLING_S
    busy = True
    while busy and time.monotonic() < deadline:
        before = time.process_time()
        time.sleep(_IDLE_S)
        busy = time.process_time() - before > _IDLE_S / 10
