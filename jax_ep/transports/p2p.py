"""Transport `p2p`: CUDA kernels, for GPUs that reach each other by loads and stores.

One process with all the GPUs. The backward of dispatch is a combine; that of combine a
dispatch of the cotangents with the same `topk_ids`, which gives them the same rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_ep import _cuda_ffi
from jax_ep.config import EPConfig
from jax_ep.primitives import Weighting, combine_p, dispatch_p
from jax_ep.results import Dispatched
from jax_ep.topology import Place, local_places, places
from jax_ep.transports.base import COMBINE_NAME, DISPATCH_NAME, Transport

if TYPE_CHECKING:
    from jax_ep.group import EPGroup

# What the kernels move at once.
_VECTOR_BYTES = 16


class P2pTransport(Transport):
    """CUDA kernels that store into the memory of the other GPUs of the process."""

    name = "p2p"

    def why_not(
        self, mesh: jax.sharding.Mesh, axis_name: str, config: EPConfig
    ) -> str | None:
        """Needs CUDA devices, all of this process, and the extension."""
        platforms = sorted({device.platform for device in mesh.devices.flat})
        if platforms != ["gpu"]:
            return f"it serves CUDA devices; the mesh has {', '.join(platforms)}."
        if len(local_places(mesh, axis_name)) != mesh.size:
            return "all devices must belong to this process; use transport='xla'."
        if config.top_k > 32:
            return f"top_k must be at most 32; got {config.top_k}."
        for bytes_per_token in _bytes_per_token(config):
            if bytes_per_token % _VECTOR_BYTES:
                return (
                    f"a token must be a multiple of {_VECTOR_BYTES} bytes; got "
                    f"{bytes_per_token}."
                )
        try:
            extension = _cuda_ffi.load()
        except ImportError as error:
            return f"the extension jax_ep._ffi_cuda cannot be loaded: {error}"
        ordinals = [_ordinal(place) for place in places(mesh, axis_name)]
        return extension.why_no_peer_access(ordinals) or None

    def open(self, group: EPGroup) -> None:
        """Allocates and connects the buffers, and loads the kernels on every device."""
        _cuda_ffi.register()
        config = group.config
        _cuda_ffi.load().open_group(
            key=group.key,
            n_ranks=group.n_ranks,
            n_experts=config.n_experts,
            top_k=config.top_k,
            max_tokens_per_rank=config.max_tokens_per_rank,
            row_bytes=max(_bytes_per_token(config)),
            n_sms=config.n_sms or 0,
            timeout_s=config.timeout_s,
            devices=[
                (_ordinal(place), place.row, place.rank)
                for place in places(group.mesh, group.axis_name)
            ],
        )

    def close(self, group: EPGroup) -> None:
        """Frees the buffers, once no call uses them."""
        _cuda_ffi.load().close_group(group.key)

    def dev_ptrs(self, group: EPGroup) -> np.ndarray:
        """See `EPGroup.dev_ptrs`."""
        pointers = [
            _cuda_ffi.load().dev_ptrs(group.key, _ordinal(place))
            for place in local_places(group.mesh, group.axis_name)
        ]
        return np.asarray(pointers, np.uint64).reshape(-1, 2, 3)

    def dispatch(
        self,
        group: EPGroup,
        tokens: jax.Array,
        topk_ids: jax.Array,
        topk_weights: jax.Array | None,
    ) -> Dispatched:
        """One custom call."""
        results = _dispatch(group, tokens, topk_ids, topk_weights)
        return Dispatched(
            **results,
            expert_ids=jnp.arange(group.n_local_experts, dtype=jnp.int32),
            topk_ids=topk_ids,
            scales=None,
            scales_offsets=None,
            group=group,
        )

    def combine(
        self,
        group: EPGroup,
        expert_out: jax.Array,
        dispatched: Dispatched,
        topk_weights: jax.Array | None,
        residual: jax.Array | None,
        *,
        reduce: bool,
    ) -> jax.Array:
        """One custom call."""
        weighting, weights = Weighting.NONE, None
        if topk_weights is not None:
            weighting, weights = Weighting.SOURCE, topk_weights
        elif dispatched.row_weights is not None:
            weighting, weights = Weighting.ROW, dispatched.row_weights
        mode = _Mode(weighting, reduce, residual is not None)
        routing = _Routing(
            dispatched.topk_ids,
            dispatched.layout,
            dispatched.row_offsets,
            dispatched.src_info,
        )
        return _combine(group, mode, expert_out, weights, residual, routing)


def _bytes_per_token(config: EPConfig) -> tuple[int, int]:
    """Of a token in dispatch, and of a row in combine; gradients travel as both."""
    return (
        config.token_format.token_bytes(config.hidden_size),
        config.hidden_size * config.combine_dtype.itemsize,
    )


def _ordinal(place: Place) -> int:
    """CUDA's number of the device, by which handlers know it."""
    return place.device.local_hardware_id


class _Routing(NamedTuple):
    """Which choice has which row.

    `topk_ids` is `int32[T, K]`; `layout` is the kernels' own; `row_offsets` is
    `uint32[L + 1]`; `src_info` is `int32[C, 2]`.
    """

    topk_ids: jax.Array
    layout: jax.Array
    row_offsets: jax.Array
    src_info: jax.Array


class _Mode(NamedTuple):
    """What is static in a combine."""

    weighting: Weighting
    reduce: bool
    has_residual: bool


def _present(*optional: jax.Array | None) -> list[jax.Array]:
    return [x for x in optional if x is not None]


def _call_dispatch(
    group: EPGroup,
    tokens: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
) -> dict[str, Any]:
    weights = _present(topk_weights)
    rows, row_offsets, src_info, n_dropped, n_invalid, layout, *row_weights = (
        dispatch_p.bind(
            lax.axis_index(group.axis_name),
            tokens,
            topk_ids,
            *weights,
            group=group,
            weighting=Weighting.ROW if weights else Weighting.NONE,
        )
    )
    return dict(
        tokens=rows,
        row_offsets=row_offsets,
        src_info=src_info,
        n_dropped=n_dropped,
        n_invalid=n_invalid,
        layout=layout,
        row_weights=row_weights[0] if row_weights else None,
    )


def _call_combine(
    group: EPGroup,
    mode: _Mode,
    expert_out: jax.Array,
    weights: jax.Array | None,
    residual: jax.Array | None,
    routing: _Routing,
) -> jax.Array:
    return combine_p.bind(
        lax.axis_index(group.axis_name),
        expert_out,
        routing.topk_ids,
        routing.layout,
        *_present(weights, residual),
        group=group,
        **mode._asdict(),
    )


def _send_back_scalars(
    group: EPGroup, scalars: jax.Array, routing: _Routing
) -> jax.Array:
    """A number per row to its choice: `[C]` to `[T, K]`, 0 where there is no row."""
    per_vector = _VECTOR_BYTES // scalars.dtype.itemsize
    rows = jnp.broadcast_to(scalars[:, None], (scalars.shape[0], per_vector))
    mode = _Mode(Weighting.NONE, reduce=False, has_residual=False)
    return _call_combine(group, mode, rows, None, None, routing)[..., 0]


def _named_dispatch(
    group: EPGroup,
    tokens: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
) -> dict[str, Any]:
    results = _call_dispatch(group, tokens, topk_ids, topk_weights)
    return checkpoint_name(results, DISPATCH_NAME)


# Not _dispatch in its own forward rule: there a policy would not see the names.
_dispatch = jax.custom_vjp(_named_dispatch, nondiff_argnums=(0,))


def _dispatch_fwd(
    group: EPGroup,
    tokens: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
) -> tuple[dict[str, Any], Any]:
    results = _named_dispatch(group, tokens, topk_ids, topk_weights)
    return results, _Routing(
        topk_ids, results["layout"], results["row_offsets"], results["src_info"]
    )


def _dispatch_bwd(
    group: EPGroup, routing: _Routing, cotangents: dict[str, Any]
) -> tuple[Any, ...]:
    mode = _Mode(Weighting.NONE, reduce=True, has_residual=False)
    grad_tokens = _call_combine(group, mode, cotangents["tokens"], None, None, routing)
    grad_weights = None
    if cotangents["row_weights"] is not None:
        grad_weights = _send_back_scalars(group, cotangents["row_weights"], routing)
    return grad_tokens, None, grad_weights


_dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


def _named_combine(
    group: EPGroup,
    mode: _Mode,
    expert_out: jax.Array,
    weights: jax.Array | None,
    residual: jax.Array | None,
    routing: _Routing,
) -> jax.Array:
    out = _call_combine(group, mode, expert_out, weights, residual, routing)
    return checkpoint_name(out, COMBINE_NAME)


_combine = jax.custom_vjp(_named_combine, nondiff_argnums=(0, 1))


def _combine_fwd(
    group: EPGroup,
    mode: _Mode,
    expert_out: jax.Array,
    weights: jax.Array | None,
    residual: jax.Array | None,
    routing: _Routing,
) -> tuple[jax.Array, Any]:
    out = _named_combine(group, mode, expert_out, weights, residual, routing)
    return out, (expert_out, weights, routing)


def _combine_bwd(
    group: EPGroup, mode: _Mode, saved: Any, cotangent: jax.Array
) -> tuple[Any, ...]:
    expert_out, weights, routing = saved
    row = jnp.arange(expert_out.shape[0], dtype=jnp.uint32)
    in_use = row < routing.row_offsets[-1]
    if not mode.reduce:
        grad_rows = _send_choices(group, cotangent, routing)
        return _clear(grad_rows, in_use), None, None, None
    at_source = mode.weighting == Weighting.SOURCE
    sent = _call_dispatch(
        group, cotangent, routing.topk_ids, weights if at_source else None
    )
    rows = sent["tokens"]
    row_weights = sent["row_weights"] if at_source else weights
    grad_weights = None
    if row_weights is not None:
        products = rows.astype(jnp.float32) * expert_out.astype(jnp.float32)
        dots = jnp.where(in_use, products.sum(axis=1), 0.0)
        grad_weights = _send_back_scalars(group, dots, routing) if at_source else dots
        rows = (row_weights[:, None] * rows.astype(jnp.float32)).astype(rows.dtype)
    grad_residual = cotangent if mode.has_residual else None
    return _clear(rows, in_use), grad_weights, grad_residual, None


def _clear(rows: jax.Array, in_use: jax.Array) -> jax.Array:
    """Zeroes the rows that are not in use, which may hold anything."""
    return jnp.where(in_use[:, None], rows, jnp.zeros((), rows.dtype))


def _send_choices(group: EPGroup, values: jax.Array, routing: _Routing) -> jax.Array:
    """`[T, K, H]`, a value per choice, to the choices' rows: one dispatch per k.

    Rows of one k stand in the same order among themselves with and without the others.
    """
    rows = None
    for k in range(values.shape[1]):
        here = jnp.arange(values.shape[1]) == k
        ids = jnp.where(here, routing.topk_ids, -1)
        sent = _call_dispatch(group, values[:, k], ids, None)["tokens"]
        is_k = routing.src_info[:, 1] == k
        place = jnp.cumsum(is_k.astype(jnp.int32)) - 1
        found = jnp.take(sent, place, axis=0, mode="clip")
        rows = found if rows is None else jnp.where(is_k[:, None], found, rows)
    return rows


_combine.defvjp(_combine_fwd, _combine_bwd)
