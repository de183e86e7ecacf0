"""The primitives of asynchronous calls, which run on XLA's stream for collectives.

XLA:GPU turns a call of a function that carries the attributes set by `_on_collective_stream` into a
pair (start, done). The start goes to that stream, the done makes the main stream wait, and XLA
keeps operands and results alive in between. It schedules the done as late as uses of the result
allow. But XLA unpacks tuples of results eagerly, which forces a wait right after the start, so such
a function may have only one result.

combine has one. The results of other calls are allocated beforehand, and the start takes them as
operands and writes into them: they are valid only after `async_done_p` has consumed the ticket.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func
from jax.interpreters import batching, mlir, partial_eval

from jax_ep.exchange import calls as primitives
from jax_ep.ffi import lowering
from jax_ep.ffi.lowering import StreamOrder
from jax_ep.geometry import Geometry

# (*types of operands, **parameters) -> the types of what a call writes.
Types = Callable[..., list[Any]]


def _on_collective_stream(ctx: mlir.LoweringRuleContext, operands: Any, emit: Any) -> list[Any]:
    """Emits `emit(*operands)` on the stream for collectives.

    In a function of its own: XLA of jax 0.10 makes only function calls asynchronous.
    """
    module, types = ctx.module_context, [x.type for x in operands]
    dialect: Any = func  # its stubs lack the overloads used here
    with ir.InsertionPoint(module.module.body):
        function = dialect.FuncOp("jax_ep_async", ir.FunctionType.get(types, []))
    function.attributes["sym_visibility"] = ir.StringAttr.get("private")
    module.symbol_table.insert(function)
    block = function.add_entry_block()
    with ir.InsertionPoint(block):
        results = list(emit(*block.arguments))
        dialect.ReturnOp(results)
    signature = ir.FunctionType.get(types, [x.type for x in results])
    function.attributes["function_type"] = ir.TypeAttr.get(signature)
    call = dialect.CallOp(function, list(operands))
    marks = {"_xla_stream_annotation": "collective", "inlineable": "false"}
    call.operation.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(
        {name: ir.StringAttr.get(value) for name, value in marks.items()}
    )
    return list(call.results)


def _gate(ctx: mlir.LoweringRuleContext, operands: Any, params: Any) -> Any:
    """The check of a call's group, available once all of `operands` are.

    XLA starts a call after the last of its operands, which it computes in any order. So `then`
    waits for all of them; otherwise the overlapping work could run before the call.
    """
    checked = lowering.emit_group_check(ctx, operands[0], params["geometry"])
    return lowering.fusion_barrier([*checked, *operands])[0]


def _hide_constants(
    ctx: mlir.LoweringRuleContext, operands: tuple[Any, ...], geometry: Geometry
) -> tuple[Any, ...]:
    """The operands, with scalars that XLA may fold to constants hidden behind a custom call.

    XLA of jax 0.12 moves a constant into the asynchronous function under a name that ptxas rejects,
    or crashes. Such scalars are input_scale and, on a mesh of one device, the coordinate.
    """
    if jax.__version_info__ < (0, 12):
        return operands
    copy = lowering.custom_call("jax_ep_async_done")  # returns its second operand

    def hide(i: int, operand: Any, aval: Any) -> Any:
        if aval.shape or (i == 0 and geometry.mesh.size > 1):
            return operand
        inner = ctx.replace(avals_in=[aval, aval], avals_out=[aval])
        return copy(inner, operand, operand)[0]

    return tuple(map(hide, range(len(operands)), operands, ctx.avals_in))


def _lower_start(
    target: str, attributes: lowering.Attributes, scratch_types: Types
) -> lowering.Lowering:
    """Allocates the results and the scratch memory, and starts a call that writes into them."""
    start = lowering.cuda_call(target, attributes, StreamOrder.ASYNC, has_side_effect=True)

    def lower(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        ticket, ready, *results = ctx.avals_out
        alloc = lowering.custom_call("jax_ep_async_alloc", has_side_effect=True)
        written = [*results, *scratch_types(*ctx.avals_in, **params)]
        outer = ctx.replace(avals_in=ctx.avals_in[:1], avals_out=[ready, *written])
        allocated, *buffers = alloc(outer, operands[0])
        inner = ctx.replace(avals_in=[*ctx.avals_in, *written], avals_out=[ticket])
        operands = _hide_constants(ctx, operands, params["geometry"])
        # `allocated` keeps XLA from scheduling the allocation after the gate.
        gate = _gate(ctx, [*operands, allocated, *buffers], params)
        tickets = _on_collective_stream(
            ctx, [gate, *operands, *buffers], lambda *x: start(inner, *x, **params)
        )
        return [*tickets, gate, *buffers[: len(results)]]

    return lower


def _lower_wait_started(ctx: mlir.LoweringRuleContext, operand: Any) -> Any:
    # The side effect keeps XLA from hoisting it out of loops.
    rule = lowering.custom_call("jax_ep_wait_started", has_side_effect=True)
    return rule(ctx, operand)


def _lower_done(ctx: mlir.LoweringRuleContext, ticket: Any, _: Any, *results: Any) -> Any:
    ctx = ctx.replace(avals_in=[ctx.avals_in[0], *ctx.avals_in[2:]])
    aliases = {i + 1: i for i in range(len(results))}
    rule = lowering.custom_call("jax_ep_async_done", operand_output_aliases=aliases)
    return lowering.fusion_barrier(rule(ctx, ticket, *results))


# The ticket of a start, available once the call is to be waited for; the same ticket, available at
# any time; results of the start -> those results.
async_done_p = lowering.make_primitive("jax_ep_async_done", cuda=_lower_done)
# An int32[] -> an undefined int32[], available once the last asynchronous call of the device is
# resident on the GPU.
wait_started_p = lowering.make_primitive("jax_ep_wait_started", cuda=_lower_wait_started)

wait_started_p.def_abstract_eval(lambda operand: [operand])
async_done_p.def_abstract_eval(lambda ticket, any_time, *results: list(results))


def make_combine_start(target: str, types: Types) -> Primitive:
    """The start of a combine with a result of this type.

    Operands of the combine, without `row_scalars` -> its result; an int32[] of undefined value,
    available once the call has all its operands.
    """
    call = lowering.cuda_call(target, primitives.combine_attributes, StreamOrder.ASYNC)

    def lower(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        operands = _hide_constants(ctx, operands, params["geometry"])
        gate = _gate(ctx, operands, params)
        inner = ctx.replace(avals_out=ctx.avals_out[:1])
        # No fusion barrier: XLA does not fuse asynchronous calls, and would wait for it at once.
        out = _on_collective_stream(ctx, [gate, *operands], lambda *x: call(inner, *x, **params))
        return [*out, gate]

    start_p = lowering.make_primitive(target, cuda=lower)

    @start_p.def_abstract_eval
    def start_types(*operands: Any, **params: Any) -> list[Any]:
        return [*types(*operands, **params), lowering.like(operands[1], (), jnp.int32)]

    return start_p


def _no_types(*_: Any, **__: Any) -> list[Any]:
    return []


def make_start(
    target: str, attributes: lowering.Attributes, types: Types, scratch_types: Types = _no_types
) -> Primitive:
    """The start of a call with results of these types.

    Operands of the call -> a ticket; an int32[] as of `make_combine_start`; the results of the
    call, valid after `async_done_p`. The handler also gets scratch memory, after the results.
    """
    start_p = lowering.make_primitive(target, cuda=_lower_start(target, attributes, scratch_types))

    @start_p.def_abstract_eval
    def start_types(*operands: Any, **params: Any) -> list[Any]:
        results = types(*operands, **params)
        # The ticket has an element per result, which tells the handler how many operands are
        # results. Its dtype is one that cotangents may have.
        ticket = lowering.like(operands[1], (len(results),), jnp.float32)
        ready = lowering.like(operands[1], (), jnp.int32)
        return [ticket, ready, *results]

    def batch(operands: Any, dims: Any, **params: Any) -> Any:
        """Under `vmap`, each call completes before the results are stacked."""

        def call(*operands: jax.Array) -> list[jax.Array]:
            ticket, ready, *results = start_p.bind(*operands, **params)
            return [ticket, ready, *async_done_p.bind(ticket, ticket, *results)]

        results = lowering.map_calls(call, operands, dims)
        return results, [0] * len(results)

    batching.primitive_batchers[start_p] = batch
    return start_p


combine_start_p = make_combine_start("jax_ep_combine_start", primitives.combine_types)
dispatch_start_p = make_start(
    "jax_ep_dispatch_start", primitives.dispatch_attributes, primitives.dispatch_types
)
# The backward of dispatch: a combine that may have `row_scalars`.
dispatch_grad_start_p = make_start(
    "jax_ep_dispatch_grad_start", primitives.combine_attributes, primitives.combine_types
)
combine_grad_start_p = make_start(
    "jax_ep_combine_grad_start", primitives.combine_attributes, primitives.combine_grad_types
)


batching.primitive_batchers[async_done_p] = lambda operands, dims: (
    list(operands[2:]),
    list(dims[2:]),
)


def _partially_evaluate_done(trace: Any, ticket: Any, any_time: Any, *results: Any) -> Any:
    """Waits early rather than passing on results that are not valid yet.

    The gradient of a loop computes before the loop what depends on none of its iterations: maybe
    the call, but not the work to wait after.
    """
    given = [x.pval.get_known() for x in (any_time, *results)]
    if ticket.pval.is_known() or any(x is None for x in given):
        operands = (ticket, any_time, *results)
        return trace.default_process_primitive(async_done_p, operands, {})
    return [trace.new_const(x) for x in async_done_p.bind(given[0], *given)]


partial_eval.custom_partial_eval_rules[async_done_p] = _partially_evaluate_done
