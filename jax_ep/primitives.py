"""The primitives behind `host` and `p2p`: result types, attributes, lowering.

No JAX effect: effects switch off jit's fast dispatch path and force results to be
kept under `jax.checkpoint`. Where the lowering says `has_side_effect`, XLA neither
merges two calls nor drops one.

On GPUs XLA may do as it likes, since all ranks run one program; and where an operand is
a slice, XLA:GPU fuses it with a copy of the call, but lets the original run as well if
it has side effects and several results. Calls that overlap are in overlap.py.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import batching, mlir

from jax_ep.formats import TokenFormat

if TYPE_CHECKING:
    from jax_ep.group import EPGroup


class Weighting(enum.IntEnum):
    """Which weights a sum uses. The same values as in C++."""

    NONE = 0
    SOURCE = 1
    ROW = 2


class Order(enum.IntEnum):
    """How a call on a GPU stands to others. The same values as in C++."""

    ALONE = 0  # no call overlaps with anything: all are on one stream
    BEHIND = 1  # it waits for calls that overlap
    BESIDE = 2  # it overlaps


class _Program:
    """Whether calls that overlap have been traced; then whole calls wait for them.

    A program is lowered when all of it has been traced. What it was then is an
    attribute of each of its calls, as captured graphs must not change. Programs that
    are traced later wait, too, and need not: while one is lowered, nobody knows what
    else it holds.
    """

    overlaps = False


def expect_overlap() -> None:
    """To be called where a call that overlaps is traced."""
    _Program.overlaps = True


# (context, *operands, **parameters of the primitive) -> the results' values.
Lowering = Callable[..., Any]


def custom_call(name: str, has_side_effect: bool = False) -> Lowering:
    """One custom call on a CPU."""

    def lower(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        rule = jax.ffi.ffi_lowering(name, has_side_effect=has_side_effect)
        return rule(ctx, *operands, **attributes(**params))

    return lower


def gpu_call(name: str, order: Order, has_side_effect: bool = False) -> Lowering:
    """One custom call on a GPU. What `check_group` gives comes before its operands."""

    def lower(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        rule = jax.ffi.ffi_lowering(name, has_side_effect=has_side_effect)
        inner = ctx.replace(avals_in=[ctx.avals_in[0], *ctx.avals_in])
        return rule(inner, *operands, **attributes(**params), order=np.int32(order))

    return lower


def whole_gpu_call(name: str) -> Lowering:
    """The check and the custom call of one that does not overlap."""

    def lower(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        order = Order.BEHIND if _Program.overlaps else Order.ALONE
        checked = check_group(ctx, operands[0], params["group"])
        return settled(gpu_call(name, order)(ctx, *checked, *operands, **params))

    return lower


def settled(results: Sequence[Any]) -> list[Any]:
    """The results of a call on a GPU, as others may have them.

    XLA:GPU of jax 0.11 fuses what stores a result in a larger array, as a scan does,
    with a copy of the call, though the original runs as well; not behind a barrier.
    """
    return barrier(results)


def barrier(values: Sequence[Any]) -> list[Any]:
    """The values, each there once all of them are."""
    return list(stablehlo.OptimizationBarrierOp(list(values)).results)


def check_group(
    ctx: mlir.LoweringRuleContext, place_index: Any, group: EPGroup
) -> Sequence[Any]:
    """What a call of the group has as its first operand, before `place_index`.

    A custom call that fails if the group is closed or has failed. XLA captures the
    others, and then does not ask their handlers again. Equal ones are merged.
    """
    scalar = ctx.avals_in[0]
    rule = jax.ffi.ffi_lowering("jax_ep_check")
    outer = ctx.replace(avals_in=[scalar], avals_out=[scalar])
    return rule(outer, place_index, group=group.key)


def make_primitive(
    name: str, *, multiple_results: bool, lowerings: dict[str, Lowering]
) -> Primitive:
    """A primitive that runs eagerly, too; `lowerings` are by platform."""
    primitive = Primitive(name)
    primitive.multiple_results = multiple_results

    def batch(
        operands: tuple[jax.Array, ...], dims: tuple[int | None, ...], **params: Any
    ) -> Any:
        results = map_calls(functools.partial(primitive.bind, **params), operands, dims)
        return results, ([0] * len(results) if multiple_results else 0)

    primitive.def_impl(functools.partial(run_eagerly, primitive))
    for platform, lowering in lowerings.items():
        mlir.register_lowering(primitive, lowering, platform=platform)
    batching.primitive_batchers[primitive] = batch
    return primitive


def run_eagerly(primitive: Primitive, *operands: jax.Array, **params: Any) -> Any:
    """As a program of its own."""
    with jax.disable_jit(False):  # which would call this again
        return jax.jit(functools.partial(primitive.bind, **params))(*operands)


def map_calls(
    call: Callable[..., Any], operands: Sequence[Any], dims: Sequence[int | None]
) -> Any:
    """One call after the other along the mapped axes: every rank makes as many."""
    mapped = [
        x if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(operands, dims, strict=True)
    ]
    is_mapped = [dim is not None for dim in dims]

    def call_one(slices: list[jax.Array]) -> Any:
        rest = iter(slices)
        merged = [
            next(rest) if m else x for x, m in zip(mapped, is_mapped, strict=True)
        ]
        return call(*merged)

    slices = [x for x, m in zip(mapped, is_mapped, strict=True) if m]
    return jax.lax.map(call_one, slices)


def attributes(
    group: EPGroup,
    weighting: Weighting,
    reduce: bool = True,
    has_residual: bool = False,
    adds_shared: bool | None = None,  # None: if the group has a shared expert
    layout_shape: tuple[int, ...] = (),  # a result's: XLA knows it
    token_format: TokenFormat | None = None,  # of a dispatch; None: the group's
) -> dict[str, Any]:
    """The attributes of every call; handlers of both platforms know them by name."""
    config, routed = group.config, group._routed
    token_format = token_format or config.token_format
    per_node, n_nodes = config.nodes(group.n_ranks)
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
        n_gpus_per_node=np.int64(per_node),
        n_nodes=np.int64(n_nodes),
        n_sms=np.int64(config.n_sms or 0),
        timeout_s=np.float64(config.timeout_s),
    )
    return dict(
        ep=ep,
        weighting=np.int32(weighting),
        reduce=np.bool_(reduce),
        has_residual=np.bool_(has_residual),
    )


def _on_both(name: str) -> dict[str, Lowering]:
    return {
        "cpu": custom_call(name, has_side_effect=True),
        "cuda": whole_gpu_call(name),
    }


dispatch_p = make_primitive(
    "jax_ep_dispatch", multiple_results=True, lowerings=_on_both("jax_ep_dispatch")
)
combine_p = make_primitive(
    "jax_ep_combine", multiple_results=False, lowerings=_on_both("jax_ep_combine")
)
combine_grad_p = make_primitive(
    "jax_ep_combine_grad",
    multiple_results=True,
    lowerings={"cpu": custom_call("jax_ep_combine_grad", has_side_effect=True)},
)


@dispatch_p.def_abstract_eval
def dispatch_types(
    place_index: Any,
    tokens: Any,
    topk_ids: Any,
    *optional: Any,
    group: EPGroup,
    weighting: Weighting,
    layout_shape: tuple[int, ...],
    token_format: TokenFormat,
) -> list[Any]:
    """Types of the results of a dispatch."""
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
    return [like(tokens, shape, dtype) for shape, dtype in types]


@combine_p.def_abstract_eval
def combine_type(
    place_index: Any,
    expert_out: Any,
    topk_ids: Any,
    layout: Any,
    *optional: Any,
    group: EPGroup,
    reduce: bool,
    **_: Any,
) -> Any:
    """Type of the result of a combine."""
    leading = topk_ids.shape[:1] if reduce else topk_ids.shape
    return like(expert_out, (*leading, expert_out.shape[1]), expert_out.dtype)


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
    return [like(expert_out, x.shape, x.dtype) for x in (expert_out, *weights)]


def like(aval: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """A result's type; it varies over the mesh axes over which the operands do."""
    return aval.update(shape=tuple(shape), dtype=np.dtype(dtype), weak_type=False)
