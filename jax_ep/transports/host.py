"""Transport `host`: the CPU devices of one process, by XLA FFI handlers in C++.

The backward of dispatch is a combine; that of combine is one call that sends the
cotangents to the rows and gets the weights' gradients on the way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_ep import _host_ffi
from jax_ep.config import EPConfig
from jax_ep.primitives import Weighting, combine_grad_p, combine_p, dispatch_p
from jax_ep.results import Dispatched
from jax_ep.topology import local_places, places
from jax_ep.transports.base import COMBINE_NAME, DISPATCH_NAME, Transport

if TYPE_CHECKING:
    from jax_ep.group import EPGroup


class HostTransport(Transport):
    """C++ handlers on the CPU devices of one process."""

    name = "host"

    def why_not(
        self, mesh: jax.sharding.Mesh, axis_name: str, config: EPConfig
    ) -> str | None:
        """Needs CPU devices, all of this process, and the extension."""
        devices = mesh.devices.flat
        platforms = sorted({device.platform for device in devices})
        if platforms != ["cpu"]:
            return f"it serves CPU devices; the mesh has {', '.join(platforms)}."
        if len(local_places(mesh, axis_name)) != mesh.size:
            return "all devices must belong to this process; use transport='xla'."
        try:
            _host_ffi.load()
        except ImportError as error:
            return f"the extension jax_ep._ffi cannot be loaded: {error}"
        return None

    def open(self, group: EPGroup) -> None:
        """Registers the handlers, and tells them which device is which rank."""
        _host_ffi.register()
        _host_ffi.load().open_host_group(
            key=group.key,
            n_ranks=group.n_ranks,
            n_experts=group.config.n_experts,
            devices=[
                (place.device.id, place.row, place.rank)
                for place in places(group.mesh, group.axis_name)
            ],
        )

    def close(self, group: EPGroup) -> None:
        """Forgets the ranks."""
        _host_ffi.load().close_host_group(group.key)

    def stats(self, group: EPGroup) -> list[dict[str, Any]]:
        """See `EPGroup.stats`."""
        config, extension = group.config, _host_ffi.load()
        token_bytes = config.token_format.token_bytes(config.hidden_size)
        result = []
        for place in local_places(group.mesh, group.axis_name):
            totals = extension.host_stats(group.key, place.row, place.rank)
            totals = {
                name: np.asarray(value, np.int64) if isinstance(value, list) else value
                for name, value in totals.items()
            }
            totals["bytes_to_rank"] = totals["tokens_to_rank"] * token_bytes
            result.append(dict(device=place.device.id, rank=place.rank, **totals))
        return result

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
            dispatched.topk_ids, dispatched.layout, dispatched.row_offsets
        )
        return _combine(group, mode, expert_out, weights, residual, routing)


class _Mode(NamedTuple):
    """What is static in a combine."""

    weighting: Weighting
    reduce: bool
    has_residual: bool


class _Routing(NamedTuple):
    """Which choice has which row.

    `topk_ids` and `dst_rows` are `int32[T, K]`, at the choice's source; `row_offsets`
    is `uint32[L + 1]`, at the rows' rank.
    """

    topk_ids: jax.Array
    dst_rows: jax.Array
    row_offsets: jax.Array


def _present(*optional: jax.Array | None) -> list[jax.Array]:
    return [x for x in optional if x is not None]


def _call_dispatch(
    group: EPGroup,
    tokens: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
) -> dict[str, Any]:
    weights = _present(topk_weights)
    rows, row_offsets, src_info, n_dropped, n_invalid, dst_rows, *row_weights = (
        dispatch_p.bind(
            lax.axis_index(group.axis_name),
            tokens,
            topk_ids,
            *weights,
            group=group,
            weighting=Weighting.ROW if weights else Weighting.NONE,
        )
    )
    results = dict(
        tokens=rows,
        row_offsets=row_offsets,
        src_info=src_info,
        n_dropped=n_dropped,
        n_invalid=n_invalid,
        layout=dst_rows,
        row_weights=row_weights[0] if row_weights else None,
    )
    return checkpoint_name(results, DISPATCH_NAME)


_dispatch = jax.custom_vjp(_call_dispatch, nondiff_argnums=(0,))


def _dispatch_fwd(
    group: EPGroup,
    tokens: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
) -> tuple[dict[str, Any], Any]:
    results = _call_dispatch(group, tokens, topk_ids, topk_weights)
    return results, _Routing(topk_ids, results["layout"], results["row_offsets"])


def _dispatch_bwd(
    group: EPGroup, routing: _Routing, cotangents: dict[str, Any]
) -> tuple[Any, ...]:
    def send_back(rows: jax.Array, *, reduce: bool) -> jax.Array:
        mode = _Mode(Weighting.NONE, reduce, has_residual=False)
        return _bind_combine(group, mode, rows, routing)

    grad_tokens = send_back(cotangents["tokens"], reduce=True)
    grad_weights = None
    if cotangents["row_weights"] is not None:
        scalars = cotangents["row_weights"][:, None]
        grad_weights = send_back(scalars, reduce=False)[..., 0]
    return grad_tokens, None, grad_weights


_dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


def _bind_combine(
    group: EPGroup,
    mode: _Mode,
    expert_out: jax.Array,
    routing: _Routing,
    *optional: jax.Array | None,
) -> jax.Array:
    return combine_p.bind(
        lax.axis_index(group.axis_name),
        expert_out,
        routing.topk_ids,
        routing.dst_rows,
        *_present(*optional),
        group=group,
        **mode._asdict(),
    )


def _call_combine(
    group: EPGroup,
    mode: _Mode,
    expert_out: jax.Array,
    weights: jax.Array | None,
    residual: jax.Array | None,
    routing: _Routing,
) -> jax.Array:
    out = _bind_combine(group, mode, expert_out, routing, weights, residual)
    return checkpoint_name(out, COMBINE_NAME)


_combine = jax.custom_vjp(_call_combine, nondiff_argnums=(0, 1))


def _combine_fwd(
    group: EPGroup,
    mode: _Mode,
    expert_out: jax.Array,
    weights: jax.Array | None,
    residual: jax.Array | None,
    routing: _Routing,
) -> tuple[jax.Array, Any]:
    out = _call_combine(group, mode, expert_out, weights, residual, routing)
    return out, (expert_out, weights, routing)


def _combine_bwd(
    group: EPGroup, mode: _Mode, saved: Any, cotangent: jax.Array
) -> tuple[Any, ...]:
    expert_out, weights, routing = saved
    grad_expert_out, *grad_weights = combine_grad_p.bind(
        lax.axis_index(group.axis_name),
        cotangent,
        expert_out,
        routing.row_offsets,
        routing.topk_ids,
        routing.dst_rows,
        *_present(weights),
        group=group,
        weighting=mode.weighting,
        reduce=mode.reduce,
    )
    grad_residual = cotangent if mode.has_residual else None
    return grad_expert_out, *(grad_weights or [None]), grad_residual, None


_combine.defvjp(_combine_fwd, _combine_bwd)
