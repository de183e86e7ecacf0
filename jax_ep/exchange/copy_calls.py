"""The calls of `p2p` for copies of experts: ranks read, or write to, each other's arrays.

For that, all ranks of a replica must be in one process.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from jax_ep.exchange.calls import coordinate
from jax_ep.exchange.checks import VECTOR_BYTES, vary_alike
from jax_ep.ffi.lowering import (
    Lowering,
    fusion_barrier,
    like,
    make_primitive,
    synchronous_cuda_call,
)
from jax_ep.geometry import Geometry

_SUM_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_MAX_RANKS, _MAX_ENTRIES = 16, 6016  # as in C++


def can_reach(geometry: Geometry, x: jax.Array, n_entries: int) -> bool:
    """Whether the calls take an array `[N, ...]`, and results of so many entries."""
    processes = {(each.replica, each.device.process_index) for each in geometry.coordinates}
    is_one_process = len(processes) * geometry.n_ranks == len(geometry.coordinates)  # a replica
    has_room = n_entries * (geometry.n_ranks + 1) <= _MAX_ENTRIES
    n_bytes = math.prod(x.shape[1:]) * x.dtype.itemsize
    is_vectors = n_bytes > 0 and n_bytes % VECTOR_BYTES == 0
    return is_one_process and is_vectors and has_room and geometry.n_ranks <= _MAX_RANKS


def fetch(
    geometry: Geometry,
    arrays: Sequence[jax.Array],
    entries: jax.Array,
    after: jax.Array,
    kept: Sequence[jax.Array] = (),
) -> tuple[list[jax.Array], jax.Array]:
    """`[S, ...]` of each array: entries from any rank, which travel while the device does more.

    Args:
        geometry: of the group.
        arrays: `[N, ...]` each.
        entries: `int32[R, S]`, the entry of this rank's arrays that becomes each of each rank's
            results; others than `[0, N)` for none.
        after: what the device computes before it waits for them.
        kept: `[S, ...]` for each array, with the entries that no rank sends; (): these are
            unspecified.

    Returns:
        What has come; and `after`, there once all entries can travel.
    """
    flat = map(_flat, [*arrays, *kept])
    operands = vary_alike(geometry.axis_names, entries, after, *flat)
    *fetched, after = fetch_p.bind(
        coordinate(geometry), *operands, geometry=geometry, n_arrays=len(arrays)
    )
    shaped = zip(fetched, arrays, strict=True)
    return [each.reshape(-1, *x.shape[1:]) for each, x in shaped], after


def can_add(x: jax.Array) -> bool:
    """Whether `add` takes this dtype."""
    return x.dtype in _SUM_DTYPES


def add(geometry: Geometry, x: jax.Array, own: jax.Array, entries: jax.Array) -> jax.Array:
    """`own`, `[S, ...]`, plus entries of other ranks' `x`, in the order of ranks, in float32.

    Args:
        geometry: of the group.
        x: `[N, ...]`, which other ranks read.
        own: what this rank adds, of the same dtype.
        entries: `int32[R, S]`, the entry of each rank's `x` for each of `own`; -1 for none. Those
            of this rank count for nothing.
    """
    operands = vary_alike(geometry.axis_names, _flat(x), entries, _flat(own))
    (out,) = add_p.bind(coordinate(geometry), *operands, geometry=geometry)
    return out.reshape(own.shape)


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], -1)


def _attributes(geometry: Geometry) -> dict[str, Any]:
    return dict(group=geometry.key)


def _lower_fetch(
    ctx: mlir.LoweringRuleContext, *operands: Any, geometry: Geometry, n_arrays: int
) -> Any:
    """Two custom calls for each array, so that XLA has the device work in between.

    It is one primitive: of two, JAX might compute the first outside of a loop, or save what has not
    come. XLA does not merge calls with side effects, nor move a result that the second call alone
    uses.
    """
    at, entries, after, *others = operands
    at_type, entries_type, after_type, *other_types = ctx.avals_in
    arrays, kept = others[:n_arrays], others[n_arrays:]
    send = _side_effect("jax_ep_send_copies", {3: 0} if kept else None)
    receive = _side_effect("jax_ep_receive_copies", {2: 0})
    sent = []
    for i, x in enumerate(arrays):
        kept_type = other_types[n_arrays + i :][:1]
        types = [at_type, other_types[i], entries_type, *kept_type]
        inner = ctx.replace(avals_in=types, avals_out=[ctx.avals_out[i]])
        sent += send(inner, at, x, entries, *kept[i : i + 1], geometry=geometry)
    after, *sent = fusion_barrier([after, *sent])
    fetched = []
    for i, x in enumerate(arrays):
        out = ctx.avals_out[i]
        inner = ctx.replace(avals_in=[at_type, other_types[i], out, after_type], avals_out=[out])
        fetched += receive(inner, at, x, sent[i], after, geometry=geometry)
    return [*fetched, after]


def _side_effect(target: str, aliases: dict[int, int] | None) -> Lowering:
    return synchronous_cuda_call(target, _attributes, aliases, has_side_effect=True)


fetch_p = make_primitive("jax_ep_send_copies", cuda=_lower_fetch)
add_p = make_primitive(
    "jax_ep_add_copies", cuda=synchronous_cuda_call("jax_ep_add_copies", _attributes, {3: 0})
)


@fetch_p.def_abstract_eval
def _types(
    _: Any, entries: Any, after: Any, *others: Any, geometry: Geometry, n_arrays: int
) -> list[Any]:
    fetched = [like(x, (entries.shape[1], x.shape[1]), x.dtype) for x in others[:n_arrays]]
    return [*fetched, after]


add_p.def_abstract_eval(lambda _, x, entries, own, geometry: [like(own, own.shape, own.dtype)])
