"""Lowering of primitives to custom calls, and what all primitives share.

The primitives have no JAX effect: effects disable jit's fast dispatch path and keep results alive
under `jax.checkpoint`. On CPUs, where each rank runs its own program, calls are lowered with
`has_side_effect`, so that XLA neither merges nor drops them. On GPUs XLA may do both, since all
ranks run the same program; but not with calls that come in pairs.
"""

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import DisabledSafetyCheck
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import batching, mlir

from jax_ep.geometry import Geometry

# (context, *operands, **parameters of the primitive) -> values of the results.
Lowering = Callable[..., Any]
# (**parameters of the primitive) -> the attributes that the handler reads.
Attributes = Callable[..., dict[str, Any]]


# The targets of all custom calls, on any platform: those that no primitive is named after, and, by
# `make_primitive`, the others. All modules that make one are imported with the package.
_targets = {"jax_ep_async_alloc", "jax_ep_check", "jax_ep_receive_copies"}


def disabled_checks() -> list[DisabledSafetyCheck]:
    """Allows `jax.export` to export every custom call of this package, on any platform.

    `jax.export` refuses custom calls that it does not know. Ours may be exported: programs name
    their group by a key, which follows from the mesh's shape, its device ids and the arguments of
    `ep_init`. The process that runs the program must have an equal group open (docs/sharp_bits.md).

        checks = jax_ep.disabled_checks()
        exported = jax.export.export(jax.jit(layer), disabled_checks=checks)(*shapes)

    Returns:
        The argument `disabled_checks` of `jax.export.export`. Targets that a program does not call
        have no effect; add your own to the list.
    """
    return [DisabledSafetyCheck.custom_call(target) for target in sorted(_targets)]


def custom_call(target: str, **options: Any) -> Lowering:
    """`jax.ffi.ffi_lowering` of a target that `disabled_checks` names."""
    assert target in _targets, target
    return jax.ffi.ffi_lowering(target, **options)


class StreamOrder(enum.IntEnum):
    """Stream ordering of a GPU call relative to others. The same values as in C++."""

    SERIAL = 0  # the program has no asynchronous calls: one stream orders all
    AFTER_ASYNC = 1  # waits for asynchronous calls in flight
    ASYNC = 2  # runs on the stream for collectives


def host_call(target: str, attributes: Attributes) -> Lowering:
    """One custom call on a CPU."""

    def lower(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        rule = custom_call(target, has_side_effect=True)
        return rule(ctx, *operands, **attributes(**params))

    return lower


def cuda_call(
    target: str,
    attributes: Attributes,
    stream_order: StreamOrder,
    has_side_effect: bool = False,
    aliases: dict[int, int] | None = None,
) -> Lowering:
    """One custom call on a GPU; the result of `emit_group_check` precedes its operands.

    `aliases`: results by the primitive's operands that are the same memory.
    """
    after_check = {i + 1: result for i, result in (aliases or {}).items()}

    def lower(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        options = dict(operand_output_aliases=after_check) if after_check else {}
        rule = custom_call(target, has_side_effect=has_side_effect, **options)
        inner = ctx.replace(avals_in=[ctx.avals_in[0], *ctx.avals_in])
        order = np.int32(stream_order)
        return rule(inner, *operands, **attributes(**params), stream_order=order)

    return lower


def synchronous_cuda_call(
    target: str,
    attributes: Attributes,
    aliases: dict[int, int] | None = None,
    has_side_effect: bool = False,
) -> Lowering:
    """The group's check, then the custom call, on the main stream."""

    def lower(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        checked = emit_group_check(ctx, operands[0], params["geometry"])
        # An exported program may be called between another's start and wait.
        waits = _AsyncCalls.traced or ctx.module_context.lowering_parameters.for_export
        order = StreamOrder.AFTER_ASYNC if waits else StreamOrder.SERIAL
        call = cuda_call(target, attributes, order, has_side_effect, aliases)
        return fusion_barrier(call(ctx, *checked, *operands, **params))

    return lower


class _AsyncCalls:
    """Whether this process has traced an asynchronous call: the one global flag.

    From then on, synchronous calls are lowered to wait for asynchronous ones. The wait is an
    attribute, since captured graphs must not change. It should depend on the program alone, but a
    lowering rule cannot see the rest of its program. A program is traced completely before it is
    lowered, so no call misses a wait; programs traced later may wait needlessly, and miss JAX's
    compilation cache.
    """

    traced = False


def expect_async_calls() -> None:
    """Called whenever an asynchronous call is traced."""
    _AsyncCalls.traced = True


def emit_group_check(
    ctx: mlir.LoweringRuleContext, coordinate: Any, geometry: Geometry
) -> Sequence[Any]:
    """A custom call that fails if the group is closed or a call of it has failed.

    Its undefined result is the first operand of the group's calls. XLA replays those as captured
    graphs without running their handlers; it does not capture the check. It merges equal checks.
    """
    scalar = ctx.avals_in[0]
    rule = custom_call("jax_ep_check")
    outer = ctx.replace(avals_in=[scalar], avals_out=[scalar])
    return rule(outer, coordinate, group=geometry.key)


def fusion_barrier(results: Sequence[Any]) -> list[Any]:
    """The results, each available once all are; XLA does not fuse across the barrier.

    XLA:GPU 0.11 otherwise fuses a consumer that stores a result in a larger array, as a scan does,
    with a copy of the call; the call then runs twice.
    """
    return list(stablehlo.OptimizationBarrierOp(list(results)).results)


def call_primitive(
    target: str, attributes: Attributes, types: Callable[..., list[Any]], on_cpu: bool = True
) -> Primitive:
    """One custom call on GPUs and, if `on_cpu`, on CPUs; `types` are those of its results."""
    lowerings = {"cuda": synchronous_cuda_call(target, attributes)}
    if on_cpu:
        lowerings["cpu"] = host_call(target, attributes)
    primitive = make_primitive(target, **lowerings)
    primitive.def_abstract_eval(types)
    return primitive


def make_primitive(name: str, **lowerings: Lowering) -> Primitive:
    """A primitive with a list of results, which also runs eagerly.

    `lowerings`, by platform, are to custom calls whose target is `name`, at least on one platform.
    """
    if lowerings:
        _targets.add(name)
    primitive = Primitive(name)
    primitive.multiple_results = True

    def batch(operands: tuple[jax.Array, ...], dims: tuple[int | None, ...], **params: Any) -> Any:
        results = map_calls(functools.partial(primitive.bind, **params), operands, dims)
        return results, [0] * len(results)

    def run_eagerly(*operands: jax.Array, **params: Any) -> Any:
        with jax.disable_jit(False):  # under disable_jit, jax.jit would call this again
            return jax.jit(functools.partial(primitive.bind, **params))(*operands)

    primitive.def_impl(run_eagerly)
    for platform, lowering in lowerings.items():
        mlir.register_lowering(primitive, lowering, platform=platform)
    batching.primitive_batchers[primitive] = batch
    return primitive


def map_calls(call: Callable[..., Any], operands: Sequence[Any], dims: Sequence[int | None]) -> Any:
    """Calls once per index of the mapped axes, in sequence, equally often on every rank."""
    pairs = list(zip(operands, dims, strict=True))

    def call_one(slices: list[jax.Array]) -> Any:
        rest = iter(slices)
        return call(*(x if dim is None else next(rest) for x, dim in pairs))

    mapped = [jnp.moveaxis(x, dim, 0) for x, dim in pairs if dim is not None]
    return jax.lax.map(call_one, mapped)


def like(aval: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """The type of a result, which varies over the same mesh axes as `aval`."""
    return aval.update(shape=tuple(shape), dtype=np.dtype(dtype), weak_type=False)
