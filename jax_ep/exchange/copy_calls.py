"""The calls of `p2p` for copies of experts: ranks read each other's arrays.

For that, all ranks of a replica must be in one process.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from jax_ep.exchange.calls import coordinate
from jax_ep.exchange.checks import VECTOR_BYTES, vary_alike
from jax_ep.ffi.lowering import like, make_primitive, synchronous_cuda_call
from jax_ep.geometry import Geometry

_SUM_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_MAX_RANKS, _MAX_POINTERS = 16, 6016  # kMaxCopyRanks, kMaxCopiesSmemBytes / 8 in C++
_KEPT = 2  # the operand whose entries the result keeps


def can_pull(geometry: Geometry, x: jax.Array, n_entries: int) -> bool:
    """Whether the calls take an array `[N, ...]`, and results of so many entries."""
    processes = {(each.replica, each.device.process_index) for each in geometry.coordinates}
    is_one_process = len(processes) * geometry.n_ranks == len(geometry.coordinates)  # a replica
    has_room = n_entries * (geometry.n_ranks + 1) <= _MAX_POINTERS
    n_bytes = math.prod(x.shape[1:]) * x.dtype.itemsize
    is_vectors = n_bytes > 0 and n_bytes % VECTOR_BYTES == 0
    return is_one_process and is_vectors and has_room and geometry.n_ranks <= _MAX_RANKS


def pull(geometry: Geometry, x: jax.Array, out: jax.Array, entries: jax.Array) -> jax.Array:
    """`out`, `[S, ...]`, with the entries that other ranks have for it.

    Args:
        geometry: of the group.
        x: `[N, ...]`, which other ranks read.
        out: of the same dtype.
        entries: `int32[R, S]`, the entry of each rank's `x` for each of `out`; -1 for none. Those
            of this rank count for nothing.
    """
    return _bind(pull_p, geometry, x, out, entries)


def can_add(x: jax.Array) -> bool:
    """Whether `add` takes this dtype."""
    return x.dtype in _SUM_DTYPES


def add(geometry: Geometry, x: jax.Array, own: jax.Array, entries: jax.Array) -> jax.Array:
    """As `pull`, but sums in the order of ranks, with this rank's in `own`; in float32."""
    return _bind(add_p, geometry, x, own, entries)


def _bind(
    primitive: Primitive, geometry: Geometry, x: jax.Array, out: jax.Array, entries: jax.Array
) -> jax.Array:
    flat = [each.reshape(each.shape[0], -1) for each in (x, out)]
    operands = vary_alike(geometry.axis_names, *flat, entries)
    return primitive.bind(coordinate(geometry), *operands, geometry=geometry)[0].reshape(out.shape)


def _attributes(geometry: Geometry) -> dict[str, Any]:
    return dict(group=geometry.key)


def _types(_: Any, x: Any, out: Any, entries: Any, *, geometry: Geometry) -> list[Any]:
    return [like(out, out.shape, out.dtype)]


def _make(name: str) -> Primitive:
    primitive = make_primitive(name, cuda=synchronous_cuda_call(name, _attributes, {_KEPT: 0}))
    primitive.def_abstract_eval(_types)
    return primitive


pull_p, add_p = _make("jax_ep_pull_copies"), _make("jax_ep_add_copies")
