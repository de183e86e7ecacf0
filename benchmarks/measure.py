"""Measures one case: checks every implementation, then times them in turn.

The programs of all implementations compile in parallel. An implementation that fails is reported
and left out.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh

import implementations
import layers
import overlap
import profiler
import programs
import timing
from implementations import BALANCED, NODES, OURS, Implementation, on_gpu
from plan import Item
from workload import Workload, require

_BURST_PAUSE_S = 0.03
_STEPS = {**programs.STEPS, **overlap.STEPS, **layers.STEPS}

# A line of output: a row by the name of its table, or words by `failed` or `not_measured`.
Line = dict[str, Any]
# Compiled functions and their arguments, by `"dispatch"`, `(operation, length)` and so on.
Calls = dict[Any, timing.Call]


def breaks_devices(error: Exception) -> bool:
    """Whether the process that raised `error` must not be used any more."""
    is_of_xla = isinstance(error, JaxRuntimeError)
    return is_of_xla and "RESOURCE_EXHAUSTED" not in str(error)


def measure(item: Item, mesh: Mesh, transport: str) -> Iterator[Line]:
    """Yields the results of an item of kind `case`, each as soon as it is known."""
    case = dataclasses.replace(item.case, n_ranks=mesh.size)
    with contextlib.ExitStack() as stack:
        compared = []
        for name in item.implementations:
            try:
                compared.append(implementations.make(name, mesh, case, transport))
            except ValueError as error:
                if name not in NODES:
                    raise
                yield {"not_measured": f"{name}: {error}"}  # the same in all processes
                continue
            if compared[-1].group is not None:
                stack.callback(compared[-1].group.close)
        yield from _Measurement(dataclasses.replace(item, case=case), mesh).run(compared)


class _Measurement:
    def __init__(self, item: Item, mesh: Mesh) -> None:
        self._item, self._mesh, self._on_gpu = item, mesh, on_gpu(mesh)
        self._workload = Workload(mesh, item.case, max(item.n_sets, 1))
        self._calls: dict[str, Calls] = {}  # of each implementation that passed the checks

    def run(self, compared: list[Implementation]) -> Iterator[Line]:
        case, n = self._item.case, self._workload.remote_messages
        facts = {"token_bytes": case.token_bytes, "remote_messages": n}
        yield {"cases": {"name": case.name} | dataclasses.asdict(case) | facts}
        # In several processes, compilation may wait for that of the same program in the others.
        n_threads = os.cpu_count() if jax.process_count() == 1 else 1
        with concurrent.futures.ThreadPoolExecutor(n_threads) as pool:
            futures = [self._compile(pool, implementation) for implementation in compared]
        for implementation, compiled in zip(compared, futures, strict=True):
            calls: Calls = {}
            try:
                calls = {key: future.result() for key, future in compiled.items()}
                self._check(implementation, calls)
                self._calls[implementation.name] = calls
            except (AssertionError, JaxRuntimeError) as error:
                if calls and breaks_devices(error):  # compilation errors do not
                    raise
                yield {"failed": f"{implementation.name}: {error}"[:2000]}
        if self._item.n_sets:
            yield from self._kernels()
        if self._item.wall:
            yield from self._wall()
        for operation in self._item.chains:
            yield from self._chain(operation)

    def _compile(
        self, pool: concurrent.futures.Executor, implementation: Implementation
    ) -> dict[Any, concurrent.futures.Future]:
        """Starts compilation of the calls; the arguments of combine are shapes."""
        item, workload, programs_of = self._item, self._workload, {}
        operands, combines = workload.sets[0], not item.case.is_quantized
        programs_of["dispatch"] = programs.dispatch(implementation), operands
        if combines:
            dispatch = programs.on_mesh(self._mesh, programs.dispatch(implementation))
            given = jax.eval_shape(dispatch, *operands)
            args = given, given.tokens, operands[2]
            programs_of["combine"] = programs.combine(implementation), args
        for operation, lengths in item.chains.items():
            step = _STEPS[operation](implementation)
            for n in {*lengths, *(item.bursts or ())}:
                chain = programs.chain(step, n, self._on_gpu)
                programs_of[operation, n] = chain, workload.chain_args
        if item.n_sets and implementation.name in OURS:
            rotation = programs.rotation(implementation, self._on_gpu, combines)
            programs_of["rotation"] = rotation, workload.rotation_args

        return {
            key: pool.submit(programs.compiled, self._mesh, *program)
            for key, program in programs_of.items()
        }

    def _check(self, implementation: Implementation, calls: Calls) -> None:
        """Checks all results but those of `rotation`; sets the arguments of combine."""
        name, workload, item = implementation.name, self._workload, self._item
        if item.case.is_quantized or name == BALANCED:
            workload.check_sums(implementation)
        else:
            dispatch, operands = calls["dispatch"]
            dispatched = dispatch(*operands)
            rows = workload.check_dispatch(name, dispatched)
            dispatched = dataclasses.replace(dispatched, tokens=rows)  # frees the others
            calls["combine"] = calls["combine"][0], (dispatched, rows, operands[2])
            workload.check_combine(name, _run(calls["combine"]))
        for operation, (few, _) in item.chains.items():
            if operation == "layer":
                out = _run(calls[operation, few])[0]
                problem = layers.check(item.case, workload.sets[0], workload.chain_args[2], out)
                require(problem is None, f"{name}: {problem}.")
            if operation in programs.STEPS:
                workload.check_chain(name, few, *_run(calls[operation, few]))

    def _of_all(self, key: Any) -> dict[str, timing.Call]:
        """Returns the call of each implementation that has the program `key`."""
        return {name: calls[key] for name, calls in self._calls.items() if key in calls}

    def _wall(self) -> Iterator[Line]:
        """Times lone calls; for chains, those of one step."""
        keys: dict[str, Any] = {"dispatch": "dispatch", "combine": "combine"}
        for operation, (few, _) in self._item.chains.items():
            keys |= {operation: (operation, few)} if few == 1 else {}
        for operation, key in keys.items():
            samples = timing.wall(self._of_all(key), self._item.repeats)
            for name, seconds in samples.items():
                yield _result(name, operation, "wall", seconds)

    def _chain(self, operation: str) -> Iterator[Line]:
        """Times periods in a chain; with a layer, also in bursts, and the layer's kernels."""
        item = self._item
        rhythms = [("chain", item.chains[operation], item.repeats)]
        if item.bursts:
            pause = {"n_queued": 1, "pause_s": _BURST_PAUSE_S}
            repeats = dataclasses.replace(item.repeats, **pause)
            rhythms.append(("chain in bursts", item.bursts, repeats))
        for clock, lengths, repeats in rhythms:
            short, long = (self._of_all((operation, n)) for n in lengths)
            pairs = {name: (call, long[name]) for name, call in short.items()}
            for name, seconds in timing.period(pairs, lengths, repeats).items():
                yield _result(name, operation, clock, seconds, lengths=lengths)
        if item.case.width:
            yield from self._other_kernels(operation)

    def _kernels(self) -> Iterator[Line]:
        """Times the package's kernels, over all GPUs and calls.

        Leaves out the first dispatch of each call, which waits for the GPU that starts last.
        """
        operations = ["dispatch"] if self._item.case.is_quantized else profiler.KERNELS

        def seconds(traced: list) -> dict[str, Any]:
            n = self._item.n_sets
            found = {o: profiler.kernel_seconds(traced, o, n) for o in operations}
            found["dispatch"] = found["dispatch"][:, 1:]
            return {operation: times.reshape(-1) for operation, times in found.items()}

        flush = self._workload.flush
        yield from self._trace("rotation", "kernel", seconds, flush)

    def _other_kernels(self, operation: str) -> Iterator[Line]:
        """Times the kernels of a chain that are not the package's, per step."""
        few, _ = self._item.chains[operation]

        def seconds(traced: list) -> dict[str, Any]:
            return {operation: [s / few for s in profiler.other_seconds(traced)]}

        yield from self._trace((operation, few), "other kernels", seconds)

    def _trace(
        self, key: Any, clock: str, seconds: Callable, flush: Callable | None = None
    ) -> Iterator[Line]:
        """Traces the calls of each implementation; `seconds` maps a trace to times by operation."""
        for name, call in self._of_all(key).items():
            try:
                for operation, found in seconds(profiler.trace(call, flush)).items():
                    yield _result(name, operation, clock, found)
            except profiler.TraceError as error:
                kind = "failed" if self._on_gpu else "not_measured"
                yield {kind: f"{name}, kernel clock: {error}"[:2000]}


def _run(call: timing.Call) -> Any:
    function, args = call
    return function(*args)


def _result(name: str, operation: str, clock: str, seconds: Any, **more: Any) -> Line:
    what = {"operation": operation, "clock": clock, "implementation": name}
    return {"times": what | timing.summary(seconds) | more}
