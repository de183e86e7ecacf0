"""The measurements of `python -m jax_ep bench`: calls, each as a program of its own."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep
from jax_ep.cli import workload

_N_WARM_UP = 3

Tick = Callable[[str], None]  # is told the name of a program before each of its calls


class Timing(NamedTuple):
    """Seconds of each call; bytes of the T x K rows that a rank sends in one, or None."""

    name: str
    seconds: list[float]
    n_bytes: int | None

    def cells(self) -> list[str]:
        """Microseconds: median, min, max; GB/s of the median."""
        median = statistics.median(self.seconds)
        times = (median, min(self.seconds), max(self.seconds))
        rate = "" if self.n_bytes is None else f"{self.n_bytes / median * 1e-9:.2f}"
        return [self.name, *(f"{1e6 * t:.0f}" for t in times), rate]


class Program(NamedTuple):
    """A jitted function with its operands, to be timed."""

    name: str
    call: Callable[..., Any]
    operands: tuple[Any, ...]
    n_bytes: int | None = None

    def time(self, repeats: int, tick: Tick) -> Timing:
        """Times `repeats` calls, after a few that compile and warm up."""
        seconds = []
        for _ in range(_N_WARM_UP + repeats):
            tick(self.name)
            start = time.perf_counter()
            jax.block_until_ready(self.call(*self.operands))
            seconds.append(time.perf_counter() - start)
        return Timing(self.name, seconds[_N_WARM_UP:], self.n_bytes)


def n_calls(repeats: int, expert_size: int | None) -> int:
    """Calls that `measure` makes, and so ticks."""
    return (2 if expert_size is None else 4) * (_N_WARM_UP + repeats)


def measure(
    mesh: jax.sharding.Mesh,
    group: jax_ep.EPGroup,
    repeats: int,
    expert_size: int | None,
    tick: Tick,
) -> list[Timing]:
    """Times both calls with random inputs and, given F, a layer without and with its gradients."""
    config = group.config
    random = workload.random_choices(config, group.n_ranks, seed=0)
    shape, dtype = (*random.shape[:2], config.hidden_size), config.token_format.token_dtypes[0]
    numbers = np.random.default_rng(1).standard_normal(shape, np.float32).astype(dtype)
    tokens, choices = workload.shard(mesh, numbers), workload.shard(mesh, random)
    programs = _exchange(mesh, group, tokens, choices)
    if expert_size is not None:
        programs += _layer(mesh, group, tokens, choices, expert_size)
    return [program.time(repeats, tick) for program in programs]


def _exchange(
    mesh: jax.sharding.Mesh, group: jax_ep.EPGroup, tokens: jax.Array, choices: jax.Array
) -> list[Program]:
    """Dispatch alone, and combine alone."""
    config = group.config

    def experts(dispatched: jax_ep.Dispatched) -> jax.Array:
        one = dispatched.row_offsets[-1].astype(config.combine_dtype)
        return jnp.broadcast_to(one, (group.max_recv_tokens, config.hidden_size))

    dispatch = workload.on_mesh(mesh, lambda x, ids: jax_ep.dispatch(group, x, ids))
    combine = workload.on_mesh(mesh, lambda rows, d: jax_ep.combine(group, rows, d))
    dispatched = dispatch(tokens, choices)
    expert_out = workload.on_mesh(mesh, experts)(dispatched)
    n_choices = config.max_tokens_per_rank * config.top_k
    sent = n_choices * config.token_format.token_bytes(config.hidden_size)
    returned = n_choices * config.hidden_size * config.sum_dtype.itemsize
    return [
        Program("dispatch", dispatch, (tokens, choices), sent),
        Program("combine", combine, (expert_out, dispatched), returned),
    ]


def _layer(
    mesh: jax.sharding.Mesh,
    group: jax_ep.EPGroup,
    tokens: jax.Array,
    choices: jax.Array,
    expert_size: int,
) -> list[Program]:
    """Dispatch, experts and combine in one program; the same with all gradients."""
    config, size = group.config, group.config.hidden_size
    is_plain = isinstance(config.token_format, jax_ep.Plain)
    dtype = tokens.dtype if is_plain else jnp.bfloat16

    def new_weights(rank: jax.Array) -> list[jax.Array]:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(2), rank), 2)
        shapes = (size, 2 * expert_size), (expert_size, size)
        return [
            jax.random.normal(key, (group.n_local_experts, *shape), dtype) / shape[0] ** 0.5
            for key, shape in zip(keys, shapes, strict=True)
        ]

    def layer(weights: list[jax.Array], tokens: jax.Array, ids: jax.Array) -> jax.Array:
        rows = jax_ep.dispatch(group, tokens, ids)
        results = jax_ep.expert_mlp(rows, *weights)
        return jax_ep.combine(group, results.astype(config.combine_dtype), rows)

    def gradients(weights: list[jax.Array], tokens: jax.Array, ids: jax.Array) -> Any:
        out, backward = jax.vjp(lambda w, x: layer(w, x, ids), weights, tokens)
        return backward(out)

    ranks = workload.shard(mesh, np.arange(group.n_ranks))
    operands = workload.on_mesh(mesh, new_weights)(ranks), tokens, choices
    return [
        Program("layer", workload.on_mesh(mesh, layer), operands),
        Program("layer, gradients", workload.on_mesh(mesh, gradients), operands),
    ]
