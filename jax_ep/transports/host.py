"""Transport `host`: the CPU devices of one process, by XLA FFI handlers in C++."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax

from jax_ep import _host_ffi
from jax_ep._extension import why_missing
from jax_ep.config import EPConfig
from jax_ep.exchange import Exchange
from jax_ep.primitives import combine_grad_p
from jax_ep.stats import RankStats
from jax_ep.topology import exchange_places, local_places, places
from jax_ep.transports.ffi import (
    FfiTransport,
    Mode,
    Routing,
    place_index,
    present,
)

if TYPE_CHECKING:
    from jax_ep.group import EPGroup


class HostTransport(FfiTransport):
    """C++ handlers on the CPU devices of one process."""

    name = "host"
    smallest_row = 1

    def why_not(
        self,
        mesh: jax.sharding.Mesh,
        axis_name: str,
        config: EPConfig,
        exchange: Exchange,
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
            return why_missing("_ffi", error)
        return None

    def open(self, group: EPGroup, exchange: Exchange) -> None:
        """Registers the handlers, and tells them which device is which rank."""
        config = group.config
        _host_ffi.register()
        _host_ffi.load().open_host_group(
            key=group.key,
            n_ranks=group._routed.n_ranks,
            n_experts=group._routed.n_experts,
            token_bytes=config.token_format.token_bytes(config.hidden_size),
            devices=[
                (place.device.id, place.row, place.rank)
                for place in exchange_places(group, places(group.mesh, group.axis_name))
            ],
        )

    def close(self, group: EPGroup) -> None:
        """Forgets the ranks."""
        _host_ffi.load().close_host_group(group.key)

    def stats(self, group: EPGroup) -> list[RankStats]:
        """See `EPGroup.stats`."""
        count = functools.partial(_host_ffi.load().host_stats, group.key)
        here = local_places(group.mesh, group.axis_name)
        return [
            RankStats.from_counts(group, place, count(known.row, known.rank))
            for place, known in zip(here, exchange_places(group, here), strict=True)
        ]

    def layout_shape(self, group: EPGroup, n_tokens: int) -> tuple[int, ...]:
        """`[T, K]`: the row of each choice at its destination, -1 = none."""
        return (n_tokens, group._routed.top_k)

    def combine_backward(
        self,
        group: EPGroup,
        mode: Mode,
        expert_out: jax.Array,
        weights: jax.Array | None,
        routing: Routing,
        cotangent: jax.Array,
    ) -> tuple[jax.Array, jax.Array | None]:
        """One custom call: cotangents to rows, weights' gradients on the way."""
        grad_expert_out, *grad_weights = combine_grad_p.bind(
            place_index(group),
            cotangent,
            expert_out,
            routing.row_offsets,
            routing.topk_ids,
            routing.layout,
            *present(weights),
            group=group,
            weighting=mode.weighting,
            reduce=mode.reduce,
            adds_shared=mode.adds_shared,
        )
        return grad_expert_out, grad_weights[0] if grad_weights else None
