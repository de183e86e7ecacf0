"""The calls of `p2p` for copies of experts: ranks read, or write to, each other's arrays.

For that, all ranks of a replica must be in one process.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jax_ep.exchange.calls import coordinate
from jax_ep.exchange.checks import VECTOR_BYTES, vary_alike
from jax_ep.ffi.lowering import like, make_primitive, map_calls, synchronous_cuda_call
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


def send(
    geometry: Geometry, x: jax.Array, entries: jax.Array, kept: jax.Array | None = None
) -> jax.Array:
    """Begins to send entries to each rank, and returns where they arrive, `[S, ...]`.

    Only `receive` may take the result. Entries that no rank sends are unspecified.

    Args:
        geometry: of the group.
        x: `[N, ...]`.
        entries: `int32[R, S]`, the entry of `x` that becomes each of each rank's result; others
            than `[0, N)` for none.
        kept: `[S, ...]`, what no rank sends.
    """
    others = () if kept is None else (_flat(kept),)
    sent = _bind(send_p, geometry, _flat(x), entries, *others)
    return sent.reshape(-1, *x.shape[1:])


def receive(geometry: Geometry, sent: jax.Array, x: jax.Array) -> jax.Array:
    """The result of `send`, once it is complete; `x` is no longer read then."""
    return _bind(receive_p, geometry, _flat(x), _flat(sent)).reshape(sent.shape)


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
    return _bind(add_p, geometry, _flat(x), entries, _flat(own)).reshape(own.shape)


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], -1)


def _bind(primitive: Primitive, geometry: Geometry, *operands: jax.Array) -> jax.Array:
    operands = vary_alike(geometry.axis_names, *operands)
    return primitive.bind(coordinate(geometry), *operands, geometry=geometry)[0]


def _attributes(geometry: Geometry) -> dict[str, Any]:
    return dict(group=geometry.key)


def _make(name: str, kept_at: int) -> Primitive:
    """Its result has the memory of the operand at `kept_at`, if there is one.

    The side effect keeps XLA from merging equal calls: each `receive` needs a `send`.
    """

    def lower(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        aliases = {kept_at: 0} if len(operands) > kept_at else None
        call = synchronous_cuda_call(name, _attributes, aliases, has_side_effect=True)
        return call(ctx, *operands, **params)

    return make_primitive(name, cuda=lower)


send_p, add_p = _make("jax_ep_send_copies", 3), _make("jax_ep_add_copies", 3)
receive_p = _make("jax_ep_receive_copies", 2)


def _entries_of(_: Any, x: Any, entries: Any, *kept: Any, geometry: Geometry) -> list[Any]:
    return [like(x, (entries.shape[1], x.shape[1]), x.dtype)]


send_p.def_abstract_eval(_entries_of)
add_p.def_abstract_eval(_entries_of)
receive_p.def_abstract_eval(lambda _, x, sent, geometry: [sent])


def _send_and_receive(coordinate: Any, x: Any, *others: Any, geometry: Geometry) -> list[Any]:
    (sent,) = send_p.bind(coordinate, x, *others, geometry=geometry)
    return receive_p.bind(coordinate, x, sent, geometry=geometry)


def _send_mapped(operands: Any, dims: Sequence[int | None], **params: Any) -> Any:
    return map_calls(functools.partial(_send_and_receive, **params), operands, dims), [0]


def _send_eagerly(*operands: jax.Array, **params: Any) -> list[Any]:
    with jax.disable_jit(False):  # as in make_primitive
        return jax.jit(functools.partial(_send_and_receive, **params))(*operands)


# Without one program around both, or with results that are stacked, XLA would move what is
# received before it has come. There, nothing is sent that has not come.
send_p.def_impl(_send_eagerly)
receive_p.def_impl(lambda _, x, sent, geometry: [sent])
batching.primitive_batchers[send_p] = _send_mapped
batching.primitive_batchers[receive_p] = lambda operands, dims, geometry: ([operands[2]], [dims[2]])
