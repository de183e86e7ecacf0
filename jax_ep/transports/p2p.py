"""Transport `p2p`: CUDA kernels, for GPUs that reach each other by loads and stores.

In one process or several of a host. The backward of combine is a dispatch of the
cotangents with the same `topk_ids`, which gives them the same rows.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_ep import _cuda_ffi
from jax_ep.config import EPConfig
from jax_ep.exchange import Exchange
from jax_ep.formats import Plain
from jax_ep.overlap import (
    Begun,
    after_begin,
    combine_beside_p,
    dispatch_begin_p,
    put_after,
)
from jax_ep.primitives import Weighting, expect_overlap
from jax_ep.results import Dispatched
from jax_ep.stats import RankStats
from jax_ep.topology import local_places
from jax_ep.transports import p2p_setup
from jax_ep.transports.base import COMBINE_NAME, DISPATCH_NAME
from jax_ep.transports.ffi import (
    FfiTransport,
    Mode,
    Routing,
    bind_combine,
    bind_dispatch,
    choose_weights,
    dispatch_call,
    routing_of,
    send_back_scalars,
)

if TYPE_CHECKING:
    from jax_ep.group import EPGroup

# What the kernels move at once.
_VECTOR_BYTES = 16
# Of experts and local experts, for divisions by multiplication (core/fast_divisor.h).
_MOST_PRODUCTS = 2**32
# Of a token: a lane each.
_MOST_CHOICES = 32


class P2pTransport(FfiTransport):
    """CUDA kernels that store into the memory of the other GPUs of the host."""

    name = "p2p"
    smallest_row = _VECTOR_BYTES // 4

    def __init__(self) -> None:
        # Of each open group, by its key; equal groups are opened once.
        self._exchanges: dict[str, Exchange] = {}

    def why_not(
        self,
        mesh: jax.sharding.Mesh,
        axis_name: str,
        config: EPConfig,
        exchange: Exchange,
    ) -> str | None:
        """Needs CUDA devices of one host, and the extension."""
        platforms = sorted({device.platform for device in mesh.devices.flat})
        if platforms != ["gpu"]:
            return f"it serves CUDA devices; the mesh has {', '.join(platforms)}."
        n_ranks = mesh.shape[axis_name]
        routed, (per_node, _) = config.routed(n_ranks), config.nodes(n_ranks)
        if per_node < routed.n_ranks:
            return f"it serves one node; got n_gpus_per_node={per_node} of {n_ranks}."
        if routed.n_experts * routed.n_groups > _MOST_PRODUCTS:
            return f"n_experts**2 / n_ranks must be at most 2**32; got {routed}."
        most = _MOST_CHOICES - int(config.fused_shared_expert)
        if config.top_k > most:
            return f"top_k must be at most {most}; got {config.top_k}."
        for row_bytes in _row_bytes(config):
            if row_bytes % _VECTOR_BYTES:
                return (
                    f"a row must be a multiple of {_VECTOR_BYTES} bytes; got "
                    f"{row_bytes}."
                )
        return p2p_setup.why_not(local_places(mesh, axis_name), exchange)

    def open(self, group: EPGroup, exchange: Exchange) -> None:
        """Allocates and connects the buffers, and loads the kernels on every device.

        Raises:
            RuntimeError: a step failed in some process; all raise it.
            TimeoutError: a process did not come.
        """
        _cuda_ffi.register()
        exchange.gather("failures", functools.partial(self._expect_no_failure, group))
        if _cuda_ffi.load().share_group(group.key):
            return
        config = group.config
        p2p_setup.open_buffers(
            group,
            exchange,
            n_ranks=group._routed.n_ranks,
            n_experts=group._routed.n_experts,
            top_k=group._routed.top_k,
            max_tokens_per_rank=config.max_tokens_per_rank,
            row_bytes=_most_bytes(config),
            n_sms=config.n_sms or 0,
            timeout_s=config.timeout_s,
        )
        self._exchanges[group.key] = exchange

    def _expect_no_failure(self, group: EPGroup) -> bytes:
        """An equal group that is open would be shared."""
        message = self._failure(group) if group.key in self._exchanges else ""
        if message:
            raise RuntimeError(
                f"an equal group, {group.key}, is open and has failed: {message} Close "
                "it first."
            )
        return b""

    def _failure(self, group: EPGroup) -> str:
        """What a call waited for in vain, on a device of this process; or ''."""
        load = _cuda_ffi.load()
        here = map(p2p_setup.ordinal, local_places(group.mesh, group.axis_name))
        return next(filter(None, (load.failure(group.key, i) for i in here)), "")

    def close(self, group: EPGroup) -> None:
        """Frees the buffers, once no call uses them."""
        if p2p_setup.disconnect(group.key):
            p2p_setup.free_buffers(group.key, self._exchanges.pop(group.key))

    def check(self, group: EPGroup) -> None:
        """See `EPGroup.check`."""
        message = self._failure(group)
        if message:
            raise jax.errors.JaxRuntimeError(f"Group {group.key}: {message}")

    def stats(self, group: EPGroup) -> list[RankStats]:
        """See `EPGroup.stats`."""
        count = functools.partial(_cuda_ffi.load().stats, group.key)
        return [
            RankStats.from_counts(group, place, count(p2p_setup.ordinal(place)))
            for place in local_places(group.mesh, group.axis_name)
        ]

    def dev_ptrs(self, group: EPGroup) -> np.ndarray:
        """See `EPGroup.dev_ptrs`."""
        pointers = [
            _cuda_ffi.load().dev_ptrs(group.key, p2p_setup.ordinal(place))
            for place in local_places(group.mesh, group.axis_name)
        ]
        return np.asarray(pointers, np.uint64).reshape(-1, 2, 3)

    def layout_shape(self, group: EPGroup, n_tokens: int) -> tuple[int, ...]:
        """`[R + R M (1 + K)]`, at the rows' rank.

        The number of messages of each source rank; then, for each message that may have
        come, its token and the row of each choice.
        """
        routed = group._routed
        n_messages = routed.n_ranks * group.config.max_tokens_per_rank
        return (routed.n_ranks + n_messages * (1 + routed.top_k),)

    def dispatch_async(
        self,
        group: EPGroup,
        tokens: jax.Array,
        topk_ids: jax.Array,
        topk_weights: jax.Array | None,
        input_scale: jax.Array | None,
    ) -> Any:
        """The whole call, begun; and its operands, to which gradients flow."""
        expect_overlap()
        given = tokens, topk_ids, topk_weights, input_scale
        fixed: Any = lax.stop_gradient(given)
        operands, params = dispatch_call(group, *fixed)
        ticket, ready, *results = dispatch_begin_p.bind(*operands, **params)
        # A policy that keeps the results has no use for the call where `then` stood.
        ready = checkpoint_name(ready, DISPATCH_NAME)
        return Begun(ticket, ready, tuple(results)), given

    def then(self, begun: Any, x: Any) -> Any:
        """See `InFlight.then`."""
        call = begun if isinstance(begun, _BegunCombine) else begun[0]
        return x if call.ready is None else after_begin(x, call.ready)

    def dispatch_wait(self, group: EPGroup, begun: Any, after: Any) -> Dispatched:
        """What `dispatch` would have given."""
        call, (tokens, topk_ids, topk_weights, input_scale) = begun
        results = call.end(after)
        return self.dispatch(
            group, tokens, topk_ids, topk_weights, input_scale, results
        )

    def n_pieces(self, group: EPGroup, rows: jax.Array) -> int:
        """Rows of a multiple of the bytes that the buffers have room for."""
        row_bytes = rows.shape[1] * rows.dtype.itemsize
        return -(-row_bytes // _most_bytes(group.config))

    def combine_async(
        self,
        group: EPGroup,
        expert_out: jax.Array,
        dispatched: Dispatched,
        topk_weights: jax.Array | None,
        residual: jax.Array | None,
        *,
        reduce: bool,
        adds_shared: bool,
    ) -> Any:
        """The whole call, begun; and its operands, to which gradients flow."""
        weighting, weights = choose_weights(dispatched, topk_weights)
        mode = Mode(weighting, reduce, residual is not None, adds_shared)
        expect_overlap()
        operands = expert_out, routing_of(dispatched), weights, residual
        fixed: Any = lax.stop_gradient(operands)
        out, ready = bind_combine(group, mode, *fixed, primitive=combine_beside_p)
        ready = checkpoint_name(ready, COMBINE_NAME)  # as in dispatch_async
        return _BegunCombine(
            out,
            ready,
            expert_out,
            dispatched,
            topk_weights,
            residual,
            reduce,
            adds_shared,
        )

    def combine_wait(self, group: EPGroup, begun: Any, after: Any) -> jax.Array:
        """What `combine` would have given."""
        return self.combine(
            group,
            begun.expert_out,
            begun.dispatched,
            begun.topk_weights,
            begun.residual,
            reduce=begun.reduce,
            adds_shared=begun.adds_shared,
            out=put_after(begun.out, after),
        )

    def combine_backward(
        self,
        group: EPGroup,
        mode: Mode,
        expert_out: jax.Array,
        weights: jax.Array | None,
        routing: Routing,
        cotangent: jax.Array,
    ) -> tuple[jax.Array, jax.Array | None]:
        """A dispatch of the cotangents, then sums and products over all rows."""
        in_use = _has_token(routing.row_offsets, routing.src_info)
        if not mode.reduce:
            return _clear(_send_choices(group, cotangent, routing), in_use), None
        at_source = mode.weighting == Weighting.SOURCE
        sent = bind_dispatch(
            group,
            cotangent,
            routing.topk_ids,
            weights if at_source else None,
            token_format=Plain(cotangent.dtype),
        )
        rows = sent["tokens"]
        row_weights = sent["row_weights"] if at_source else weights
        if row_weights is None:
            return _clear(rows, in_use), None
        products = rows.astype(jnp.float32) * expert_out.astype(jnp.float32)
        is_weighted = in_use
        if mode.adds_shared:  # unweighted: the first group
            row = jnp.arange(in_use.shape[0], dtype=jnp.uint32)
            is_weighted = in_use & (row >= routing.row_offsets[1])
            row_weights = jnp.where(is_weighted, row_weights, 1.0)
        dots = jnp.where(is_weighted, products.sum(axis=1), 0.0)
        grad_weights = send_back_scalars(group, dots, routing) if at_source else dots
        rows = (row_weights[:, None] * rows.astype(jnp.float32)).astype(rows.dtype)
        return _clear(rows, in_use), grad_weights


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _BegunCombine:
    """The result of combine, which XLA awaits at its first use; and its operands.

    `ready` is as `Begun.ready`, but stays where another function gets it: `then` waits
    there for the last call of the device, if for any.
    """

    out: jax.Array
    ready: jax.Array
    expert_out: jax.Array
    dispatched: Dispatched
    topk_weights: jax.Array | None
    residual: jax.Array | None
    reduce: bool = dataclasses.field(metadata={"static": True})
    adds_shared: bool = dataclasses.field(metadata={"static": True})


def _row_bytes(config: EPConfig) -> tuple[int, int]:
    """Of a row that dispatch gives, and of one that combine takes."""
    return (
        config.token_format.payload_bytes(config.hidden_size),
        config.hidden_size * config.combine_dtype.itemsize,
    )


def _most_bytes(config: EPConfig) -> int:
    """Of what travels for a token, either way; gradients travel both ways."""
    sent = config.token_format.token_bytes(config.hidden_size)
    sent = -(-sent // _VECTOR_BYTES) * _VECTOR_BYTES
    return max(sent, *_row_bytes(config))


def _has_token(row_offsets: jax.Array, src_info: jax.Array) -> jax.Array:
    """`bool[C]`: rows in use that are not padding."""
    row = jnp.arange(src_info.shape[0], dtype=jnp.uint32)
    return (row < row_offsets[-1]) & (src_info[:, 0] >= 0)


def _clear(rows: jax.Array, in_use: jax.Array) -> jax.Array:
    """Zeroes the rows that hold no token, but anything."""
    return jnp.where(in_use[:, None], rows, jnp.zeros((), rows.dtype))


def _send_choices(group: EPGroup, values: jax.Array, routing: Routing) -> jax.Array:
    """`[T, K, H]`, a value per choice, to the choices' rows: one dispatch per k.

    Rows of one k stand in the same order among themselves with and without the others.
    """
    rows = jnp.zeros((), values.dtype)  # every row in use has a k
    for k in range(group.config.top_k):
        here = jnp.arange(values.shape[1]) == k
        ids = jnp.where(here, routing.topk_ids, -1)
        sent = bind_dispatch(
            group, values[:, k], ids, None, token_format=Plain(values.dtype)
        )
        has_token = _has_token(sent["row_offsets"], sent["src_info"])
        sent_row = jnp.nonzero(has_token, size=has_token.shape[0])[0]
        is_k = routing.src_info[:, 1] == k
        place = jnp.cumsum(is_k.astype(jnp.int32)) - 1
        place = jnp.take(sent_row, place, mode="clip")
        found = jnp.take(sent["tokens"], place, axis=0, mode="clip")
        rows = jnp.where(is_k[:, None], found, rows)
    return rows
