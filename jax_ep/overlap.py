"""Calls that run beside others of the program, on XLA's stream for collectives.

XLA:GPU makes a pair (start, done) of a call with the attribute that `_beside` sets. The
start goes to that stream, the done makes the main stream wait, and XLA keeps operands
and results alive in between. It places a done as late as its results allow; but where
there are several results it takes them apart at once, and so waits at once. Hence a
pair may only have one. Combine's has; the results of dispatch are reserved before, and
`jax_ep_dispatch_begin` takes them as operands and writes there: they are what it says
once `dispatch_end_p` has seen its ticket, and nothing else may touch them until then.
`Begun` sees to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive, get_opaque_trace_state
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func
from jax.interpreters import batching, mlir

from jax_ep.primitives import (
    Order,
    barrier,
    check_group,
    combine_type,
    dispatch_types,
    gpu_call,
    like,
    make_primitive,
    map_calls,
    settled,
)

if TYPE_CHECKING:
    from jax_ep.group import EPGroup


class Begun:
    """A dispatch on its way: a ticket, and the results, which may not be there yet.

    A pytree of the results, complete: flattening waits for them. So what leaves the
    function that began the call, as the carry of a loop does, is what it seems to be.
    """

    def __init__(
        self, ticket: jax.Array, ready: jax.Array, results: tuple[jax.Array, ...]
    ) -> None:
        self._ticket: jax.Array | None = ticket
        self._ready: jax.Array | None = ready
        self._results, self._trace = results, get_opaque_trace_state()

    @property
    def ready(self) -> jax.Array | None:
        """A sign that the call has all that it needs; None if it came as an argument.

        For what shall come behind. Not the results: were they an operand of something
        that XLA may order behind the end of the call, XLA would copy them for the end,
        and might do so before the call has written them.
        """
        return self._ready

    def end(self, after: Any = None) -> tuple[jax.Array, ...]:
        """The results; waits for them once `after` has been computed.

        Raises:
            ValueError: the call was begun outside of the function that waits.
        """
        if self._ticket is None:
            return self._results
        if get_opaque_trace_state() != self._trace:
            raise ValueError(
                "dispatch_wait must stand in the function that called dispatch_async; "
                "pass in_flight as an argument to functions that JAX transforms."
            )
        ticket = put_after(self._ticket, after)
        # Once: XLA would copy the results for a second end, too; see `ready`.
        self._results = tuple(dispatch_end_p.bind(ticket, *self._results))
        self._ticket = None
        return self._results

    @classmethod
    def _unflatten(cls, _: None, results: Any) -> Begun:
        begun = cls.__new__(cls)
        begun._ticket, begun._ready, begun._results = None, None, tuple(results)
        return begun


jax.tree_util.register_pytree_node(
    Begun, lambda begun: (begun.end(), None), Begun._unflatten
)


def put_after(x: jax.Array, after: Any) -> jax.Array:
    """`x`, for whoever needs it only once `after`, a pytree, has been computed."""
    return x if after is None else _put_after(x, lax.stop_gradient(after))


@jax.custom_jvp
def _put_after(x: jax.Array, after: Any) -> jax.Array:
    return lax.optimization_barrier((x, after))[0]


@_put_after.defjvp
def _put_after_jvp(primals: Any, tangents: Any) -> Any:
    x, dx = _put_after(*primals), tangents[0]
    # With jax 0.10, x varies over the mesh axes that `after` varies over, too.
    missing = jax.typeof(x).mat.varying - jax.typeof(primals[0]).mat.varying
    return x, lax.pcast(dx, tuple(sorted(missing)), to="varying") if missing else dx


def _beside(ctx: mlir.LoweringRuleContext, operands: Any, emit: Any) -> list[Any]:
    """What `emit` makes of the operands, on the stream for collectives.

    In a function: XLA of jax 0.10 makes pairs of calls of functions only.
    """
    module, types = ctx.module_context, [x.type for x in operands]
    dialect: Any = func  # its stubs lack the forms that are used here
    with ir.InsertionPoint(module.module.body):
        function = dialect.FuncOp("jax_ep_overlap", ir.FunctionType.get(types, []))
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
    """The check of a call's group, there once all of `operands` are.

    XLA begins a call behind the last of its operands in an order of XLA's own choice.
    So `then` has to wait for all of them, else the work may come before the call.
    """
    checked = check_group(ctx, operands[0], params["group"])
    return barrier([*checked, *operands])[0]


def _without_constants(
    ctx: mlir.LoweringRuleContext, operands: tuple[Any, ...], group: EPGroup
) -> tuple[Any, ...]:
    """The operands of a pair; numbers that XLA may know as results of a call.

    XLA of jax 0.12 moves a constant into the function of a pair under a name that ptxas
    refuses, or crashes. Such numbers are `place_index` on one device and `input_scale`.
    """
    if jax.__version_info__ < (0, 12):
        return operands
    copy = jax.ffi.ffi_lowering("jax_ep_dispatch_end")  # gives its second operand

    def hide(i: int, operand: Any, aval: Any) -> Any:
        if aval.shape or (i == 0 and group.mesh.size > 1):
            return operand
        inner = ctx.replace(avals_in=[aval, aval], avals_out=[aval])
        return copy(inner, operand, operand)[0]

    return tuple(map(hide, range(len(operands)), operands, ctx.avals_in))


def _lower_begin(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
    ticket, ready, *results = ctx.avals_out
    reserve = jax.ffi.ffi_lowering("jax_ep_reserve", has_side_effect=True)
    outer = ctx.replace(avals_in=ctx.avals_in[:1], avals_out=[ready, *results])
    sign, *buffers = reserve(outer, operands[0])
    inner = ctx.replace(avals_in=[*ctx.avals_in, *results], avals_out=[ticket])
    begin = gpu_call("jax_ep_dispatch_begin", Order.BESIDE, has_side_effect=True)
    operands = _without_constants(ctx, operands, params["group"])
    # The call waits for it, too: else XLA might place it, with the buffers, behind.
    gate = _gate(ctx, [*operands, sign, *buffers], params)
    tickets = _beside(
        ctx, [gate, *operands, *buffers], lambda *x: begin(inner, *x, **params)
    )
    return [*tickets, gate, *buffers]


def _lower_await(ctx: mlir.LoweringRuleContext, operand: Any) -> Any:
    # In a loop, too, in each turn.
    rule = jax.ffi.ffi_lowering("jax_ep_await_begin", has_side_effect=True)
    return rule(ctx, operand)


def _lower_end(ctx: mlir.LoweringRuleContext, ticket: Any, *results: Any) -> Any:
    aliases = {i + 1: i for i in range(len(results))}
    rule = jax.ffi.ffi_lowering("jax_ep_dispatch_end", operand_output_aliases=aliases)
    return settled(rule(ctx, ticket, *results))


def _lower_combine(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
    call = gpu_call("jax_ep_combine_beside", Order.BESIDE)
    operands = _without_constants(ctx, operands, params["group"])
    gate = _gate(ctx, operands, params)
    inner = ctx.replace(avals_out=ctx.avals_out[:1])
    # Not `settled`: XLA fuses no pair, and would wait at once for a barrier's operand.
    out = _beside(ctx, [gate, *operands], lambda *x: call(inner, *x, **params))
    return [*out, gate]


# Operands as of `dispatch_p`; results: a ticket, an undefined sign that the call has
# all that it needs, and those of `dispatch_p`.
dispatch_begin_p = make_primitive(
    "jax_ep_dispatch_begin", multiple_results=True, lowerings={"cuda": _lower_begin}
)
# The ticket and the results of `dispatch_begin_p`; gives the latter.
dispatch_end_p = make_primitive(
    "jax_ep_dispatch_end", multiple_results=True, lowerings={"cuda": _lower_end}
)
# Operands as of `combine_p`; results: its own, and such a sign.
combine_beside_p = make_primitive(
    "jax_ep_combine_beside", multiple_results=True, lowerings={"cuda": _lower_combine}
)
# An int32[] to an int32[] that is undefined: there once the call before is on the GPU.
_await_begin_p = make_primitive(
    "jax_ep_await_begin", multiple_results=False, lowerings={"cuda": _lower_await}
)
_await_begin_p.def_abstract_eval(lambda operand: operand)


def awaited(results: Sequence[jax.Array], given: Sequence[jax.Array]) -> Any:
    """`results` of a call that has been begun with `given`, its differentiable ones.

    Raises:
        NotImplementedError: `given` are being differentiated. The rules for first
            derivatives are around this, so that it is a second one.
    """
    return _awaited_p.bind(*results, *given, n_results=len(results))


_awaited_p = Primitive("jax_ep_awaited")
_awaited_p.multiple_results = True


@_awaited_p.def_impl
@_awaited_p.def_abstract_eval
def _its_results(*operands: Any, n_results: int) -> list[Any]:
    return list(operands[:n_results])


def _batch_awaited(operands: Any, dims: Any, n_results: int) -> Any:
    return list(operands[:n_results]), list(dims[:n_results])


batching.primitive_batchers[_awaited_p] = _batch_awaited
mlir.register_lowering(_awaited_p, lambda _, *operands, n_results: operands[:n_results])


def after_begin(x: Any, ready: jax.Array) -> Any:
    """`x`, a pytree, for what shall begin once a call is on the GPU.

    Args:
        x: arrays.
        ready: the sign that the call has all that it needs.
    """
    begun = _await_begin_p.bind(put_after(jnp.int32(0), ready))
    return jax.tree.map(lambda leaf: put_after(leaf, (begun, ready)), x)


@dispatch_begin_p.def_abstract_eval
def _begin_types(*operands: Any, **params: Any) -> list[Any]:
    results = dispatch_types(*operands, **params)
    # An element per result; the handler finds the results by its size.
    ticket, ready = (like(operands[1], s, jnp.int32) for s in ((len(results),), ()))
    return [ticket, ready, *results]


@combine_beside_p.def_abstract_eval
def _combine_types(*operands: Any, **params: Any) -> list[Any]:
    return [combine_type(*operands, **params), like(operands[1], (), jnp.int32)]


@dispatch_end_p.def_abstract_eval
def _end_types(ticket: Any, *results: Any) -> list[Any]:
    return list(results)


def _batch_begin(operands: Any, dims: Any, **params: Any) -> Any:
    """Under `vmap` each call is complete before its results are stacked."""

    def call(*operands: jax.Array) -> list[jax.Array]:
        ticket, ready, *results = dispatch_begin_p.bind(*operands, **params)
        return [ticket, ready, *dispatch_end_p.bind(ticket, *results)]

    results = map_calls(call, operands, dims)
    return results, [0] * len(results)


def _batch_end(operands: Any, dims: Any) -> Any:
    return list(operands[1:]), list(dims[1:])


batching.primitive_batchers[dispatch_begin_p] = _batch_begin
batching.primitive_batchers[dispatch_end_p] = _batch_end
