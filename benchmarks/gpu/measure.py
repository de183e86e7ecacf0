"""Measures one contestant in one case."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gpu import programs, trace
from gpu.cases import Case, Inputs, make_inputs, traffic
from gpu.checks import Checker
from gpu.contestants import AXIS, OURS, Contestant, make_contestant

#: In the names of the package's kernels.
KERNELS = {"dispatch": "DispatchKernel", "combine": "CombineKernel"}

#: Bytes of the array that is written to empty the cache, per device.
_FLUSH_BYTES = 1 << 27

#: Loops that take longer are timed once.
_SLOW_S = 0.1


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much of everything.

    Attributes:
        repeats: of what is traced, and of what is timed.
        n_sets: inputs that take turns.
        n_pairs: dispatches and combines in the shorter and the longer chain.
        n_loop: those in one loop of a rival.
        n_queued: calls that are queued behind each other, then waited for.
    """

    repeats: int = 5
    n_sets: int = 6
    n_pairs: tuple[int, int] = (10, 30)
    n_loop: int = 10
    n_queued: int = 4


#: For calls of more tokens than `LARGE`.
LARGE, LARGE_EFFORT = 512, Effort(repeats=5, n_sets=3, n_pairs=(4, 24), n_loop=4)


class Arena:
    """One case's inputs on the devices, and what they must give."""

    def __init__(self, mesh: Mesh, case: Case, effort: Effort) -> None:
        self.mesh, self.case, self.effort = mesh, case, effort
        self._sharding = NamedSharding(mesh, PartitionSpec(AXIS))
        first = make_inputs(case, 0)
        self.traffic = traffic(case, first.topk_ids)
        self.checker = Checker(case, first)
        self.sets = [self._put(first)]
        for seed in range(1, effort.n_sets):
            self.sets.append(self._put(make_inputs(case, seed)))
        self.sample = jax.device_put(self.checker.sample, self._sharding)
        shape = (case.n_ranks, _FLUSH_BYTES // 4)
        self._flushed = jnp.zeros(shape, jnp.int32, device=self._sharding)
        self._flush = programs.on_mesh(mesh, programs.flush)
        self.flush()  # compiles

    def _put(self, inputs: Inputs) -> tuple[jax.Array, ...]:
        arrays = (inputs.tokens, inputs.topk_ids, inputs.topk_weights)
        return tuple(jax.device_put(x, self._sharding) for x in arrays)

    def flush(self) -> None:
        """Empties the caches; done when it returns."""
        self._flushed = jax.block_until_ready(self._flush(self._flushed))


def measure(arena: Arena, name: str, transport: str, parts: list[str]) -> dict:
    """Checks a contestant, then measures the parts.

    Args:
        arena: the case.
        name: of the contestant.
        transport: the package's.
        parts: of `"kernels"`, `"period"`, `"loop"`.

    Returns:
        JSON: see README.md. Under `"failed"`, what could not be measured and why;
        `"is_fatal"` if the process should not go on.
    """
    who = make_contestant(name, arena.mesh, arena.case, transport)
    try:
        return _Measurement(arena, name, who, parts).run()
    finally:
        who.close()


def breaks_devices(error: Exception) -> bool:
    """Whether a process that has raised it should not go on."""
    is_of_xla = isinstance(error, JaxRuntimeError)
    return is_of_xla and "RESOURCE_EXHAUSTED" not in str(error)


class _Measurement:
    def __init__(
        self, arena: Arena, name: str, who: Contestant, parts: list[str]
    ) -> None:
        self._arena, self._name, self._who, self._parts = arena, name, who, parts
        self._effort, self._sets = arena.effort, arena.sets
        self._result: dict[str, Any] = {
            "failed": [],
            "traffic": arena.traffic,
            "seconds": {},
        }

    def run(self) -> dict[str, Any]:
        parts = {"kernels": self._kernels, "period": self._period, "loop": self._loop}
        steps = {"compile": self._compile, "check": self._check}
        for name, body in (steps | {part: parts[part] for part in self._parts}).items():
            try:
                self._timed(name, body)
            except (AssertionError, trace.TraceError, JaxRuntimeError) as error:
                self._result["failed"].append(f"{name}: {error}"[:2000])
                if name != "compile" and breaks_devices(error):
                    self._result["is_fatal"] = True
                    break
                if name in steps:
                    break
        for operation in KERNELS:
            if operation in self._result:
                self._result[operation] |= self._rates(operation)
        return self._result

    def _timed(self, step: str, body: Callable[[], None]) -> None:
        start = time.monotonic()
        try:
            body()
        finally:
            self._result["seconds"][step] = round(time.monotonic() - start, 2)

    def _rates(self, operation: str) -> dict[str, float]:
        """GB/s: of all rows; and of what leaves a GPU, one message per remote rank."""
        traffic, row_bytes = self._arena.traffic, self._arena.case.row_bytes
        ns = self._result[operation]["median_us"] * 1e3
        rates = {"logical_gb_s": round(traffic["rows"] * row_bytes / ns, 1)}
        if self._name in OURS:
            n_bytes = traffic["remote_messages"] * row_bytes
            rates["physical_gb_s"] = round(n_bytes / ns, 1)
        return rates

    def _compile(self) -> None:
        who, on_mesh = self._who, functools.partial(programs.on_mesh, self._arena.mesh)
        args, is_ours = self._sets[0], self._name in OURS
        dispatch = on_mesh(programs.dispatch(who))
        received = jax.eval_shape(dispatch, *args)
        wanted = {
            "dispatch": (dispatch, args),
            "combine": (
                on_mesh(programs.combine(who)),
                (received, received.tokens, args[2]),
            ),
            "examine": (
                on_mesh(programs.examine),
                (received.tokens, received.row_offsets, self._arena.sample),
            ),
        }
        if "kernels" in self._parts and is_ours:
            wanted["rotation"] = (on_mesh(programs.rotation(who)), (self._sets,))
        if "period" in self._parts:
            for n in self._effort.n_pairs:
                wanted[f"chain {n}"] = (on_mesh(programs.chain(who, n)), args)
        if "loop" in self._parts:
            n = self._effort.n_loop
            wanted["loop"] = (on_mesh(programs.loop(who, n)), args)
        self._programs = programs.compile_all(wanted)

    def _check(self) -> None:
        """Keeps what combine takes: the result of a dispatch, and the experts' rows."""
        checker, args = self._arena.checker, self._sets[0]
        dispatched = self._programs["dispatch"](*args)
        rows, sampled = self._programs["examine"](
            dispatched.tokens, dispatched.row_offsets, self._arena.sample
        )
        checker.check_dispatch(self._name, dispatched, sampled)
        dispatched = programs.replace(dispatched, tokens=rows)  # frees the others
        self._combine_args = (dispatched, rows, args[2])
        checker.check_combine(
            self._name, self._programs["combine"](*self._combine_args)
        )

    def _kernels(self) -> None:
        self._own_kernels() if self._name in OURS else self._spans()

    def _own_kernels(self) -> None:
        """Of calls with inputs that are not in the cache."""
        repeats = self._effort.repeats
        calls = self._trace([(self._programs["rotation"], (self._sets,))] * repeats)
        self._result |= _kernels(calls, self._effort.n_sets)

    def _spans(self) -> None:
        """From the first kernel of a call to its last one.

        On the GPU where that is shortest: it began last and waited for nobody.
        """
        runs = []
        for i in range(self._effort.repeats):
            runs.append((self._programs["dispatch"], self._sets[i % len(self._sets)]))
            runs.append((self._programs["combine"], self._combine_args))
        calls = self._trace(runs)
        for i, operation in enumerate(KERNELS):
            spans = [[trace.span_us(call) for call in gpu[i::2]] for gpu in calls]
            self._result[operation] = trace.summary(list(np.min(spans, axis=0)))
            longest = float(np.median(np.max(spans, axis=0)))
            self._result[operation]["median_of_longest_us"] = round(longest, 2)
            self._result[f"{operation}_kernels"] = len(calls[0][i])

    def _trace(self, runs: list[tuple[Any, tuple]]) -> list[list[list[trace.Event]]]:
        """Events by GPU and run, each behind a flush of the caches.

        The first run of a program loads kernels, and takes as long as it likes.
        """
        for function, args in {id(f): (f, a) for f, a in runs}.values():
            jax.block_until_ready([function(*args), function(*args)])

        def run_all() -> None:
            for function, args in runs:
                trace.pause()
                self._arena.flush()
                trace.pause()
                jax.block_until_ready(function(*args))

        return [gpu[1::2] for gpu in trace.calls_of(2 * len(runs), run_all)]

    def _period(self) -> None:
        """Of a dispatch and a combine in a chain, and of the kernels in that chain."""
        few, many = self._effort.n_pairs
        chains = {n: self._programs[f"chain {n}"] for n in (few, many)}
        times: dict[int, list[float]] = {few: [], many: []}
        for repeat in range(2 * self._effort.repeats + 1):
            for n, function in chains.items():
                seconds = self._queue(function)
                if repeat:  # the first one warms up
                    times[n].append(seconds)
        periods = [
            (long - short) / (many - few) * 1e6
            for short, long in zip(times[few], times[many], strict=True)
        ]
        self._result["pair_period"] = trace.summary(periods)
        self._chain_kernels(chains[many], many)

    def _chain_kernels(self, function: Any, n_pairs: int) -> None:
        calls = self._trace([(function, self._sets[0])] * self._effort.repeats)
        kernels = _kernels(calls, n_pairs)
        self._result["chain_kernels"] = kernels
        medians = [figures["median_us"] for figures in kernels.values()]
        events = [len(call) for gpu in calls for call in gpu]
        self._result["other_kernels_per_call"] = max(events) - 2 * n_pairs
        period = self._result["pair_period"]["median_us"]
        self._result["overhead_us"] = round((period - sum(medians)) / 2, 2)

    def _loop(self) -> None:
        """Of a dispatch and a combine in a loop on the device."""
        n, loop = self._effort.n_loop, self._programs["loop"]
        self._queue(loop)  # warms up
        is_slow = self._queue(loop) > _SLOW_S
        repeats = 1 if is_slow else self._effort.repeats
        times = [self._queue(loop) / n * 1e6 for _ in range(repeats)]
        self._result["pair_period"] = trace.summary(times)

    def _queue(self, function: Any) -> float:
        """Seconds per call of several that are queued, then waited for."""
        n = self._effort.n_queued
        args = self._sets[0]
        start = time.perf_counter()
        jax.block_until_ready([function(*args) for _ in range(n)])
        return (time.perf_counter() - start) / n


def _kernels(
    calls: list[list[list[trace.Event]]], n_wanted: int
) -> dict[str, dict[str, Any]]:
    """Of the package's kernels, over all GPUs and calls.

    The first dispatch of a call is left out: it waits for the GPU that begins last.
    """
    times = {
        operation: kernel_times(calls, kernel, n_wanted)
        for operation, kernel in KERNELS.items()
    }
    times["dispatch"] = [t[1:] for t in times["dispatch"]]
    return {
        operation: trace.summary([us for call in some for us in call])
        for operation, some in times.items()
    }


def kernel_times(
    calls: list[list[list[trace.Event]]], kernel: str, n_wanted: int
) -> list[list[float]]:
    """Microseconds of a kernel, for each GPU and call, in order of time."""
    times = [
        [event.us for event in call if kernel in event.name]
        for gpu in calls
        for call in gpu
    ]
    found = {len(t) for t in times}
    if found != {n_wanted}:
        names = sorted({event.name for event in calls[0][0]})
        raise trace.TraceError(
            f"the trace must show {n_wanted} times {kernel} in each call; got {found}, "
            f"and the names {names}."
        )
    return times
