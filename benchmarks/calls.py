"""The time that calls add to a program: the gaps between their kernels in a chain.

They are measured in two ways: in a trace of a chain of round trips, which the profiler may
make longer, and as the part of the period in a chain that is not in the traced kernels.

While the profiler runs, XLA uses no command buffers, unless a program is compiled with an option.
Such programs come last: XLA's default is to avoid corrupted memory.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.sharding import Mesh

import implementations
import profiler
import programs
import timing
from case import Case
from implementations import AT_DISPATCH, Implementation, on_gpu
from plan import Item
from workload import Workload

_TOKENS = (1, 8, 128)
_CASE = functools.partial(Case, hidden_size=7168, n_experts=256, top_k=8, capacity=1.5)
_IN_COMMAND_BUFFERS = {"xla_enable_command_buffers_during_profiling": True}

Line = dict[str, Any]


def measure(item: Item, mesh: Mesh, transport: str) -> Iterator[Line]:
    """Yields the results of an item of kind `calls`."""
    with contextlib.ExitStack() as stack:
        chains = {}
        for n_tokens in _TOKENS:
            case = _CASE(n_tokens, n_ranks=mesh.size)
            ours = implementations.make(AT_DISPATCH, mesh, case, transport)
            stack.enter_context(ours.group)
            chains[n_tokens] = _Chains(item, mesh, ours, case)
            yield from chains[n_tokens].run()
        if not item.variant:
            for each in chains.values():
                yield from each.run_in_command_buffers()


class _Chains:
    """Chains of round trips of one case."""

    def __init__(self, item: Item, mesh: Mesh, ours: Implementation, case: Case) -> None:
        self._item, self._mesh, self._ours, self._case = item, mesh, ours, case
        self._workload = Workload(mesh, case, 1)
        self._lengths = item.chains["round trip"]
        self._periods = np.array([])

    def run(self) -> Iterator[Line]:
        """Measures periods, and kernels and gaps in a trace without command buffers."""
        short, long = (self._compile(n) for n in self._lengths)
        self._workload.check_chain(AT_DISPATCH, self._lengths[0], *short[0](*short[1]))
        pairs = {AT_DISPATCH: (short, long)}
        samples = timing.period(pairs, self._lengths, self._item.repeats)
        self._periods = np.array(samples[AT_DISPATCH])
        missing = "failed" if on_gpu(self._mesh) else "not_measured"
        variant = self._item.variant or "traced without command buffers"
        yield from self._trace(long, variant, missing)

    def run_in_command_buffers(self) -> Iterator[Line]:
        """Measures kernels and gaps in a trace of command buffers."""
        long = self._compile(self._lengths[1], _IN_COMMAND_BUFFERS)
        yield from self._trace(long, "", "not_measured")

    def _trace(self, long: timing.Call, variant: str, missing: str) -> Iterator[Line]:
        figures = {"period": self._periods}
        try:
            traced = profiler.trace(long, None)
            kernels = profiler.chain_seconds(traced, self._lengths[1])
            gaps, others = profiler.gaps(traced, self._lengths[1])
            in_kernels = np.median(sum(kernels.values()))
            figures |= {operation: seconds.reshape(-1) for operation, seconds in kernels.items()}
            figures |= {"gap by period": (self._periods - in_kernels) / 2, "gap": np.array(gaps)}
            for name, n in others.items():
                yield {"gap_kernels": self._where(variant) | {"name": name, "per_gap": n}}
        except profiler.TraceError as error:
            where = ", ".join(filter(None, self._where(variant).values()))
            yield {missing: f"{where}: {error}"[:2000]}
        for operation, seconds in figures.items():
            what = {"operation": operation, "clock": "gaps", "implementation": AT_DISPATCH}
            yield {"times": self._where(variant) | what | timing.summary(seconds)}

    def _compile(self, n: int, options: dict[str, Any] | None = None) -> timing.Call:
        chain = programs.chain(programs.round_trip(self._ours), n, on_gpu(self._mesh))
        return programs.compiled(self._mesh, chain, self._workload.chain_args, options)

    def _where(self, variant: str) -> dict[str, str | None]:
        return {"case": self._case.name, "variant": variant or None}
