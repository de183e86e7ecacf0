"""The primitives behind `host` and `p2p`: result types, attributes, lowering.

No JAX effect: effects switch off jit's fast dispatch path and force results to be
kept under `jax.checkpoint`. Where the lowering says `has_side_effect`, XLA neither
merges two calls nor drops one.

On GPUs only halves that send say so: two of them must not become one, as each is waited
for by itself. For the others XLA may do as it likes, since all ranks run one program;
and where an operand is a slice, XLA:GPU fuses it with a copy of the call, but lets the
original run as well if it has side effects and several results.
"""

from __future__ import annotations

import enum
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jax_ep.formats import TokenFormat

if TYPE_CHECKING:
    from jax_ep.group import EPGroup


class Weighting(enum.IntEnum):
    """Which weights a sum uses. The same values as in C++."""

    NONE = 0
    SOURCE = 1
    ROW = 2


def _primitive(
    name: str,
    *,
    multiple_results: bool,
    platforms: tuple[str, ...] = ("cpu", "cuda"),
    side_effect_on: tuple[str, ...] = ("cpu",),
) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = multiple_results

    def run_eagerly(*operands: jax.Array, **params: Any) -> Any:
        return jax.jit(functools.partial(primitive.bind, **params))(*operands)

    def lower(
        ctx: mlir.LoweringRuleContext,
        *operands: Any,
        has_side_effect: bool,
        **params: Any,
    ) -> Any:
        rule = jax.ffi.ffi_lowering(name, has_side_effect=has_side_effect)
        return rule(ctx, *operands, **_attributes(**params))

    def batch(
        operands: tuple[jax.Array, ...], dims: tuple[int | None, ...], **params: Any
    ) -> Any:
        """One call after the other: every rank makes as many."""
        mapped = [
            x if dim is None else jnp.moveaxis(x, dim, 0)
            for x, dim in zip(operands, dims, strict=True)
        ]
        is_mapped = [dim is not None for dim in dims]

        def call(slices: list[jax.Array]) -> Any:
            rest = iter(slices)
            merged = [
                next(rest) if m else x for x, m in zip(mapped, is_mapped, strict=True)
            ]
            return primitive.bind(*merged, **params)

        results = jax.lax.map(
            call, [x for x, m in zip(mapped, is_mapped, strict=True) if m]
        )
        return results, ([0] * len(results) if multiple_results else 0)

    primitive.def_impl(run_eagerly)
    for platform in platforms:
        rule = functools.partial(lower, has_side_effect=platform in side_effect_on)
        mlir.register_lowering(primitive, rule, platform=platform)
    batching.primitive_batchers[primitive] = batch
    return primitive


def _attributes(
    group: EPGroup,
    weighting: Weighting,
    reduce: bool = True,
    has_residual: bool = False,
    adds_shared: bool | None = None,  # None: if the group has a shared expert
    layout_shape: tuple[int, ...] = (),  # a result's: XLA knows it
    token_format: TokenFormat | None = None,  # of a dispatch; None: the group's
) -> dict[str, Any]:
    config, routed = group.config, group._routed
    token_format = token_format or config.token_format
    ep = dict(
        group=group.key,
        n_ranks=np.int64(routed.n_ranks),
        n_experts=np.int64(routed.n_experts),
        top_k=np.int64(routed.top_k),
        hidden_size=np.int64(config.hidden_size),
        max_tokens_per_rank=np.int64(config.max_tokens_per_rank),
        max_recv_tokens=np.int64(group.max_recv_tokens),
        token_format=token_format.name,
        payload_bytes=np.int64(token_format.payload_bytes(config.hidden_size)),
        n_scales=np.int64(token_format.n_scales(config.hidden_size)),
        scales_layout=token_format.layout.name,
        # The same for all dispatches of a group: cotangents go to the tokens' rows.
        row_alignment=np.int64(config.token_format.layout.row_alignment),
        combine_dtype=config.combine_dtype.name,
        fused_shared_expert=np.bool_(
            config.fused_shared_expert if adds_shared is None else adds_shared
        ),
        skip_a2a=np.bool_(config.skip_a2a),
        n_gpus_per_node=np.int64(config.n_gpus_per_node or group.n_ranks),
        n_nodes=np.int64(config.n_nodes or 1),
        n_sms=np.int64(config.n_sms or 0),
        timeout_s=np.float64(config.timeout_s),
    )
    return dict(
        ep=ep,
        weighting=np.int32(weighting),
        reduce=np.bool_(reduce),
        has_residual=np.bool_(has_residual),
    )


dispatch_p = _primitive("jax_ep_dispatch", multiple_results=True)
combine_p = _primitive("jax_ep_combine", multiple_results=False)
combine_grad_p = _primitive(
    "jax_ep_combine_grad", multiple_results=True, platforms=("cpu",)
)

# Halves: between the two, a ticket.
dispatch_send_p = _primitive(
    "jax_ep_dispatch_send",
    multiple_results=False,
    platforms=("cuda",),
    side_effect_on=("cuda",),
)
dispatch_receive_p = _primitive(
    "jax_ep_dispatch_receive", multiple_results=True, platforms=("cuda",)
)
combine_send_p = _primitive(
    "jax_ep_combine_send",
    multiple_results=False,
    platforms=("cuda",),
    side_effect_on=("cuda",),
)
combine_receive_p = _primitive(
    "jax_ep_combine_receive", multiple_results=False, platforms=("cuda",)
)

# As in C++: struct Ticket.
_TICKET_SHAPE = (4,)


@dispatch_receive_p.def_abstract_eval
@dispatch_p.def_abstract_eval
def _dispatch_types(
    place_index_or_ticket: Any,
    tokens: Any,
    topk_ids: Any,
    *optional: Any,
    group: EPGroup,
    weighting: Weighting,
    layout_shape: tuple[int, ...],
    token_format: TokenFormat,
) -> list[Any]:
    rows, hidden_size = group.max_recv_tokens, group.config.hidden_size
    types = [
        ((rows, token_format.row_size(hidden_size)), token_format.row_dtype),  # tokens
        ((group._routed.n_groups + 1,), jnp.uint32),  # row_offsets
        ((rows, 2), jnp.int32),  # src_info
        ((), jnp.int32),  # n_dropped
        ((), jnp.int32),  # n_invalid
        (layout_shape, jnp.int32),  # layout
    ]
    if weighting == Weighting.ROW:
        types.append(((rows,), jnp.float32))  # row_weights
    if token_format.scale_dtype is not None:
        n_scales, layout = token_format.n_scales(hidden_size), token_format.layout
        shape = layout.shape(rows, n_scales, group._routed.n_groups)
        types.append((shape, token_format.scale_dtype))  # scales
    return [_like(tokens, shape, dtype) for shape, dtype in types]


@combine_receive_p.def_abstract_eval
@combine_p.def_abstract_eval
def _combine_types(
    place_index_or_ticket: Any,
    expert_out: Any,
    topk_ids: Any,
    layout: Any,
    *optional: Any,
    group: EPGroup,
    reduce: bool,
    **_: Any,
) -> Any:
    leading = topk_ids.shape[:1] if reduce else topk_ids.shape
    return _like(expert_out, (*leading, expert_out.shape[1]), expert_out.dtype)


@dispatch_send_p.def_abstract_eval
@combine_send_p.def_abstract_eval
def _ticket_type(place_index: Any, rows: Any, *_: Any, **__: Any) -> Any:
    return _like(rows, _TICKET_SHAPE, jnp.int32)


@combine_grad_p.def_abstract_eval
def _combine_grad_types(
    place_index: Any,
    cotangent: Any,
    expert_out: Any,
    row_offsets: Any,
    topk_ids: Any,
    dst_rows: Any,
    *weights: Any,
    **_: Any,
) -> list[Any]:
    return [_like(expert_out, x.shape, x.dtype) for x in (expert_out, *weights)]


def _like(aval: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """A result's type: it varies over the mesh axes over which the operands do."""
    return aval.update(shape=tuple(shape), dtype=np.dtype(dtype), weak_type=False)
