"""What calls add to a program: gaps between kernels in a chain, and its first calls.

The gaps are measured in two ways: in a trace of a chain of round trips, which the profiler may
make longer, and as the part of the period in a chain that is not in the traced kernels.

While the profiler runs, XLA uses no command buffers, unless a program is compiled with an option.
Such programs come last: XLA's default is to avoid corrupted memory.
"""

import concurrent.futures
import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
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
# The tokens and the round trips of the programs whose first calls are timed. XLA makes no command
# buffers of fewer than five kernels.
_FIRST_TOKENS = 8
_FIRST_LENGTHS = (1, 4)
_ORDINALS = ("first", "second", "third")
_IN_COMMAND_BUFFERS = {"xla_enable_command_buffers_during_profiling": True}

Line = dict[str, Any]


def measure(item: Item, mesh: Mesh, transport: str) -> Iterator[Line]:
    """Yields the results of an item of kind `calls`; its samples are as many programs."""
    with contextlib.ExitStack() as stack:
        chains = {}
        for n_tokens in _TOKENS:
            case = _CASE(n_tokens, n_ranks=mesh.size)
            ours = implementations.make(AT_DISPATCH, mesh, case, transport)
            stack.enter_context(ours.group)
            chains[n_tokens] = _Chains(item, mesh, ours, case)
            yield from chains[n_tokens].run()
        yield from chains[_FIRST_TOKENS].run_first_calls()
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
        pair = [self._compile(self._chain(n)) for n in self._lengths]
        self._check(pair[0], self._lengths[0])
        pairs = {AT_DISPATCH: (pair[0], pair[1])}
        samples = timing.period(pairs, self._lengths, self._item.repeats)
        self._periods = np.array(samples[AT_DISPATCH])
        missing = "failed" if on_gpu(self._mesh) else "not_measured"
        where = self._where(self._item.variant or "traced without command buffers")
        yield from self._trace(pair[1], where, missing)

    def run_in_command_buffers(self) -> Iterator[Line]:
        """Measures kernels and gaps in a trace of command buffers."""
        long = self._compile(self._chain(self._lengths[1]), _IN_COMMAND_BUFFERS)
        yield from self._trace(long, self._where(""), "not_measured")

    def _trace(self, long: timing.Call, where: str, missing: str) -> Iterator[Line]:
        figures: dict[str, Any] = {"period": timing.summary(self._periods)}
        try:
            traced = profiler.trace(long, None)
            kernels = profiler.chain_seconds(traced, self._lengths[1])
            gaps, others = profiler.gaps(traced, self._lengths[1])
            for operation, seconds in kernels.items():
                figures[operation] = timing.summary(seconds.reshape(-1))
            in_kernels = np.median(sum(kernels.values()))
            figures["gap by period"] = timing.summary((self._periods - in_kernels) / 2)
            figures |= {"gap": timing.summary(gaps), "others": others}
        except profiler.TraceError as error:
            yield {missing: f"{where}: {error}"[:2000]}
        yield {"calls": {where: figures}}

    def run_first_calls(self) -> Iterator[Line]:
        """Measures the first calls of compiled programs, all of which return tokens."""
        for n in _FIRST_LENGTHS:
            bodies = {"round trips": _tokens_of(self._chain(n)), "as many results": _fill}
            compiled = self._compile_all(bodies, self._item.repeats.max_samples + 1)
            samples = timing.first_calls(compiled, len(_ORDINALS))
            figures = {
                name: dict(zip(_ORDINALS, map(timing.summary, each), strict=True))
                for name, each in samples.items()
            }
            where = self._where(self._item.variant)
            yield {"first_calls": {f"{n} × round trip, {where}": figures}}

    def _chain(self, n: int) -> Callable[..., Any]:
        return programs.chain(programs.round_trip(self._ours), n, on_gpu(self._mesh))

    def _compile(
        self, body: Callable[..., Any], options: dict[str, Any] | None = None
    ) -> timing.Call:
        args = self._workload.chain_args
        lowered = programs.on_mesh(self._mesh, body).lower(*args)
        return lowered.compile(compiler_options=options), args

    def _compile_all(
        self, bodies: dict[str, Callable[..., Any]], n: int
    ) -> dict[str, list[timing.Call]]:
        """Compiles each body `n` times; no two programs are equal."""

        def numbered(body, number):
            return lambda *args: (body(*args), jnp.full(1, number))

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            return {
                name: list(pool.map(self._compile, [numbered(body, i) for i in range(n)]))
                for name, body in bodies.items()
            }

    def _check(self, call: timing.Call, n: int) -> None:
        function, args = call
        self._workload.check_chain(AT_DISPATCH, n, *function(*args))

    def _where(self, variant: str) -> str:
        return ", ".join(filter(None, [self._case.name, variant]))


def _tokens_of(chain: Callable[..., Any]) -> Callable[..., jax.Array]:
    return lambda *args: chain(*args)[0]


def _fill(tokens: jax.Array, routings: Any, parameters: Any, passes: jax.Array) -> jax.Array:
    """Returns as many numbers as a chain; they depend on an argument, so that XLA computes them."""
    return jnp.full(tokens.shape, (passes[0] + 1).astype(tokens.dtype))
