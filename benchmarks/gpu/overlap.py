"""How much of a call hides behind a dense layer, and what that costs the layer.

Periods of chains, of wall time: of calls on all multiprocessors, of calls on `n_sms` of
them, of the layer, and of both beside each other. Each call waits for the former.

Twice: without a pause, where matmuls reach the GPU's power limit, which then lowers the
clock for all that runs; and in bursts of a few milliseconds, where it falls less.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.errors import JaxRuntimeError

import jax_ep
from gpu import programs, trace
from gpu.clocks import Clocks
from gpu.contestants import AXIS
from gpu.measure import KERNELS, Arena, Effort, breaks_devices

_BURST_PAUSE_S = 0.03
_BURST_PAIRS = (2, 10)


@dataclasses.dataclass(frozen=True)
class Groups:
    """One takes all multiprocessors, the other `n_sms`."""

    all_sms: jax_ep.EPGroup
    some_sms: jax_ep.EPGroup


def measure(
    arena: Arena,
    n_sms: int | None,
    transport: str,
    width: int,
) -> dict[str, Any]:
    """Of dispatch, and of combine with weights that travel with the tokens.

    Args:
        arena: the case.
        n_sms: of the calls that overlap; None is the package's choice.
        transport: the package's.
        width: of the dense layer.

    Returns:
        JSON, see README.md: figures by operation; under `"failed"` what went wrong.
    """
    groups = Groups(*(_make_group(arena, n, transport) for n in (None, n_sms)))
    result: dict[str, Any] = {"n_sms": n_sms, "dense_width": width, "failed": []}
    try:
        for operation in KERNELS:
            try:
                chains = _Chains(arena, groups, operation, width)
                result[operation] = _measure(arena, chains)
            except (AssertionError, JaxRuntimeError, trace.TraceError) as error:
                result["failed"].append(f"{operation}: {error}"[:2000])
                if breaks_devices(error):
                    result["is_fatal"] = True
                    break
    finally:
        groups.all_sms.close()
        groups.some_sms.close()
    return result


def _make_group(arena: Arena, n_sms: int | None, transport: str) -> jax_ep.EPGroup:
    case = arena.case
    config = jax_ep.EPConfig(
        n_experts=case.n_experts,
        top_k=case.top_k,
        hidden_size=case.hidden_size,
        max_tokens_per_rank=case.n_tokens,
        recv_capacity=case.n_rows,
        n_sms=n_sms,
        timeout_s=30.0
        if n_sms is None
        else 31.0,  # two groups also where both are None
    )
    return jax_ep.ep_init(arena.mesh, AXIS, config, transport=transport)


def _measure(arena: Arena, chains: _Chains) -> dict[str, Any]:
    chains.check()
    result = _periods(chains, _sustained(arena.effort))
    result["burst"] = _periods(chains, _burst(arena.effort))
    try:
        result["dense_slowdown"] = round(chains.slowdown(), 4)
    except trace.TraceError as error:
        result["dense_slowdown"] = None
        result["no_slowdown"] = str(error)
    return result


@dataclasses.dataclass(frozen=True)
class _Rhythm:
    """How chains follow each other: `n_queued` at once, then a pause.

    Attributes:
        pairs: links of the shorter and of the longer chain.
    """

    pairs: tuple[int, int]
    n_queued: int
    repeats: int
    pause_s: float = 0.0

    def compile(self, chains: _Chains, body: Callable[..., Any], which: str) -> None:
        """So that clocks are not those of GPUs that wait for a compiler."""
        for n in self.pairs:
            jax.block_until_ready(chains.run(body, which, n))

    def period(
        self, chains: _Chains, body: Callable[..., Any], which: str = "some_sms"
    ) -> float:
        """Microseconds of one link of a chain."""
        seconds: tuple[list[float], list[float]] = [], []
        for repeat in range(self.repeats + 1):
            for n, found in zip(self.pairs, seconds, strict=True):
                took = self._seconds(functools.partial(chains.run, body, which, n))
                if repeat:  # the first one compiles
                    found.append(took)
        short, long = (np.median(found) for found in seconds)
        return float(long - short) / (self.pairs[1] - self.pairs[0]) * 1e6

    def _seconds(self, run: Callable[[], Any]) -> float:
        time.sleep(self.pause_s)
        start = time.perf_counter()
        jax.block_until_ready([run() for _ in range(self.n_queued)])
        return (time.perf_counter() - start) / self.n_queued


def _sustained(effort: Effort) -> _Rhythm:
    return _Rhythm(effort.n_pairs, effort.n_queued, 2 * effort.repeats)


def _burst(effort: Effort) -> _Rhythm:
    return _Rhythm(_BURST_PAIRS, 1, 3 * effort.repeats, _BURST_PAUSE_S)


def _periods(chains: _Chains, rhythm: _Rhythm) -> dict[str, Any]:
    """Figures of both calls and of the layer; and clocks, where there is no pause."""
    periods, clocks = {}, {}
    for name, body, which in (
        ("call", chains.call, "all_sms"),
        ("call_some_sms", chains.call, "some_sms"),
        ("dense", chains.dense, "some_sms"),
        ("both", chains.both, "some_sms"),
    ):
        rhythm.compile(chains, body, which)
        with Clocks() as sampled:
            periods[name] = rhythm.period(chains, body, which)
        clocks[name] = sampled.summary
    call, some, dense, both = periods.values()
    result: dict[str, Any] = {f"{name}_us": us for name, us in periods.items()}
    result |= {
        "hidden": (call + dense - both) / min(call, dense),
        "hidden_same_sms": (some + dense - both) / min(some, dense),
        "speedup": (call + dense) / both,
    }
    result = {name: round(value, 4) for name, value in result.items()}
    return result if rhythm.pause_s else {**result, "clocks": clocks}


class _Chains:
    """Functions that repeat a call, the dense layer, or both `n` times."""

    def __init__(
        self, arena: Arena, groups: Groups, operation: str, width: int
    ) -> None:
        self._arena, self._groups, self._operation = arena, groups, operation
        self._matrices = _matrices(arena, width)
        self._compiled: dict[tuple, Any] = {}

    def run(self, body: Callable[..., Any], which: str, n: int) -> Any:
        """The results of a chain of `n`."""
        key = body.__name__, which, n
        args = (*self._arena.sets[0], *self._matrices)
        if key not in self._compiled:
            group = getattr(self._groups, which)
            chain = functools.partial(self._chain, body, group, n)
            self._compiled[key] = programs.on_mesh(self._arena.mesh, chain)
        return self._compiled[key](*args)

    def _chain(
        self,
        body: Callable[..., Any],
        group: jax_ep.EPGroup,
        n: int,
        tokens: jax.Array,
        ids: jax.Array,
        weights: jax.Array,
        *matrices: jax.Array,
    ) -> Any:
        matrices = tuple(m[0] for m in matrices)
        rows = None
        if self._operation == "combine" and body != self.dense:
            rows = jax_ep.dispatch(group, tokens, ids, weights)
        zero, y = jnp.int32(0), tokens
        for _ in range(n):
            given = rows, (tokens, ids + zero, weights)
            zero, y = body(group, given, zero, y, matrices)
        return y, zero[None]

    def call(self, group: jax_ep.EPGroup, given: Any, zero: Any, y: Any, _: Any) -> Any:
        """The call alone."""
        rows, operands = given
        if rows is None:
            return jax_ep.dispatch(group, *operands).n_dropped, y
        rows = programs.replace(rows, topk_ids=operands[1])
        return _zero(jax_ep.combine(group, rows.tokens, rows)), y

    def dense(self, _: Any, given: Any, zero: Any, y: Any, matrices: Any) -> Any:
        """The layer alone."""
        return zero, _layer(y, matrices)

    def both(
        self, group: jax_ep.EPGroup, given: Any, zero: Any, y: Any, matrices: Any
    ) -> Any:
        """The layer between the call's beginning and its end."""
        rows, operands = given
        if rows is None:
            flight = jax_ep.dispatch_async(group, *operands)
            y = _layer(flight.then(y), matrices)
            return jax_ep.dispatch_wait(group, flight, after=y).n_dropped, y
        rows = programs.replace(rows, topk_ids=operands[1])
        flight = jax_ep.combine_async(group, rows.tokens, rows)
        y = _layer(flight.then(y), matrices)
        return _zero(jax_ep.combine_wait(group, flight, after=y)), y

    def check(self) -> None:
        """A call that overlaps must give the bits of one that does not."""

        def run(overlaps: bool, tokens: Any, ids: Any, weights: Any) -> Any:
            group = self._groups.some_sms if overlaps else self._groups.all_sms
            if not overlaps:
                rows = jax_ep.dispatch(group, tokens, ids, weights)
                out = jax_ep.combine(group, rows.tokens, rows)
            else:
                flight = jax_ep.dispatch_async(group, tokens, ids, weights)
                beside = jnp.sin(flight.then(tokens))
                rows = jax_ep.dispatch_wait(group, flight, after=beside)
                flight = jax_ep.combine_async(group, rows.tokens, rows)
                beside = jnp.sin(flight.then(beside))
                out = jax_ep.combine_wait(group, flight, after=beside)
            in_use = jnp.arange(rows.tokens.shape[0]) < rows.row_offsets[-1].astype(
                jnp.int32
            )
            seen = jnp.where(in_use[:, None], rows.tokens, 0)
            return out, seen, rows.row_offsets

        args, mesh = self._arena.sets[0], self._arena.mesh
        one, two = (
            programs.on_mesh(mesh, functools.partial(run, o))(*args)
            for o in (False, True)
        )
        for a, b in zip(one, two, strict=True):
            for left, right in zip(
                a.addressable_shards, b.addressable_shards, strict=True
            ):
                same = np.array_equal(
                    np.asarray(left.data).view(np.uint8),
                    np.asarray(right.data).view(np.uint8),
                )
                assert same, "a call that overlaps must give the same bits"

    def slowdown(self) -> float:
        """Of the kernels of the layer beside the call, against those alone.

        What a chain of calls alone has besides the package's kernels is left out.
        """
        n = self._arena.effort.n_pairs[0]
        dense, both = (self._others_us(b, n) for b in (self.dense, self.both))
        calls = self._others_us(self.call, n)
        return (both - calls) / dense - 1

    def _others_us(self, body: Callable[..., Any], n: int) -> float:
        """Time of all kernels but the package's, of the GPU where it is the median."""
        run = functools.partial(self.run, body, "some_sms", n)
        jax.block_until_ready([run(), run()])
        repeats = self._arena.effort.repeats

        def run_often() -> None:
            for _ in range(repeats):
                trace.pause()
                jax.block_until_ready(run())

        sums = [
            sum(e.us for e in call if not any(k in e.name for k in KERNELS.values()))
            for gpu in trace.calls_of(repeats, run_often)
            for call in gpu
        ]
        return float(np.median(sums))


def _matrices(arena: Arena, width: int) -> tuple[jax.Array, ...]:
    """Of the layer, the same on all ranks."""
    hidden, n_ranks = arena.case.hidden_size, arena.case.n_ranks
    return tuple(
        jax.device_put(
            np.broadcast_to(
                (np.random.default_rng(3).standard_normal(shape) / shape[0] ** 0.5)
                .astype(np.float32)
                .astype(jnp.bfloat16),
                (n_ranks, *shape),
            ),
            arena.sample.sharding,
        )
        for shape in ((hidden, width), (width, hidden))
    )


def _layer(x: jax.Array, matrices: tuple[jax.Array, ...]) -> jax.Array:
    up, down = matrices
    return lax.tanh(lax.tanh(x @ up) @ down)


def _zero(out: jax.Array) -> jax.Array:
    """A 0 that XLA cannot foresee."""
    return (out[0, 0].astype(jnp.float32) * 0).astype(jnp.int32)
