"""Work that overlaps with an asynchronous call, in the backward as well as in the forward.

In the forward, barriers order the start of the call, the work and the wait. In the backward, the
rule of the wait starts a call, and the rules below follow in reverse. What they need for their
barriers passes from one to the other as cotangents, for which `CotangentSlots` are made.

XLA removes an operand of a barrier if nothing else uses it, so a barrier alone does not order what
it is given. That is why the wait comes after `started`, too.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive, get_opaque_trace_state

from jax_ep.exchange.async_primitives import async_done_p, wait_started_p
from jax_ep.exchange.checks import vary_alike
from jax_ep.ffi.lowering import expect_async_calls


def start_call(
    start_p: Primitive, arrays: Sequence[jax.Array], params: dict[str, Any]
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """Ticket, `ready` and results of a call whose results are allocated beforehand."""
    expect_async_calls()
    ticket, ready, *results = start_p.bind(*arrays, **params)
    return ticket, ready, tuple(results)


def wait_started(ready: jax.Array) -> jax.Array:
    """`int32[]` of undefined value, available once the call's blocks are resident on the GPU."""
    return wait_started_p.bind(order_after(jnp.int32(0), ready))[0]


def after_start(x: Any, started: jax.Array, ready: jax.Array) -> Any:
    """`x`, a pytree, available at the same time."""
    return jax.tree.map(lambda leaf: order_after(leaf, (started, ready)), x)


def order_after(x: jax.Array, after: Any) -> jax.Array:
    """`x`, available only once `after`, a pytree, has been computed."""
    return _order_after(x, lax.stop_gradient(after)) if jax.tree.leaves(after) else x


@jax.custom_jvp
def _order_after(x: jax.Array, after: Any) -> jax.Array:
    return lax.optimization_barrier((x, after))[0]


@_order_after.defjvp
def _order_after_jvp(primals: Any, tangents: Any) -> Any:
    x, dx = _order_after(*primals), tangents[0]
    # With jax 0.10, x also varies over the mesh axes that `after` varies over.
    missing = jax.typeof(x).mat.varying - jax.typeof(primals[0]).mat.varying
    return x, lax.pcast(dx, tuple(sorted(missing)), to="varying") if missing else dx


class CotangentSlots(NamedTuple):
    """Where the backward of a call puts what that of the overlapping work needs: in cotangents.

    Attributes:
        ticket: `float32[n]`; that of the backward's call, which has n results. These are then the
            cotangents of the call's operands, and valid once the ticket has been consumed.
        any_time: the same ticket, which the work does not delay.
        started: `float32[]` for the wait and for each piece of work; available once the backward's
            call has started.
    """

    ticket: jax.Array
    any_time: jax.Array
    started: tuple[jax.Array, ...]


def make_slots(n_results: int, like: jax.Array) -> CotangentSlots:
    """Slots for one piece of work; they vary over the mesh axes that `like` varies over."""
    ticket = jnp.zeros(n_results, jnp.float32)
    return _vary_like(like, CotangentSlots(ticket, ticket, (jnp.float32(0),)))


class Overlap:
    """The work that overlaps with a call in flight."""

    def __init__(self, operands: Sequence[jax.Array]) -> None:
        """`operands`: those whose gradients the backward's call returns, in order; maybe none."""
        self.before_wait: tuple[Any, ...] = ()  # results of the work; that the call has started
        self._operands = tuple(operands)
        self._slots: CotangentSlots | None = None
        self._trace = get_opaque_trace_state()

    def then(self, x: Any, ready: jax.Array) -> Any:
        """`InFlight.then`; `ready` is that of the call."""
        started = wait_started(ready)
        if self._is_in_function():
            self.before_wait += (started,)
        return after_start(x, started, ready)

    def run(self, work: Callable[..., Any], args: tuple[Any, ...], ready: jax.Array) -> Any:
        """`InFlight.overlap`."""
        self.check_function("in_flight.overlap")
        if self._operands:
            work = self._with_backward(work, ready)
        result = work(*self.then(args, ready))
        self.before_wait += (result,)
        return result

    def _with_backward(self, work: Callable[..., Any], ready: jax.Array) -> Callable[..., Any]:
        """The work, whose backward overlaps with that of the call."""

        def run(*args: Any) -> Any:
            if self._slots is None:
                slots = make_slots(len(self._operands), ready)
                self._operands, self._slots = _begin(self._operands, slots)
            args, ticket = _enter(_vary_like(ready, args), self._slots.ticket)
            result = work(*args)
            if jax.__version_info__ < (0, 11):  # whose barriers make gradients vary
                result = _vary_like(ready, result)
            result, started = _leave(result, _vary_like(ready, jnp.float32(0)))
            all_started = *self._slots.started, started
            self._slots = self._slots._replace(ticket=ticket, started=all_started)
            return result

        return run

    def take(self) -> tuple[tuple[jax.Array, ...], CotangentSlots] | None:
        """The operands and slots for the rule of the wait; None without work, or the second time.

        Two waits would add up gradients that are not valid yet. None also in another function,
        which would pass them on, or add them up.
        """
        if self._slots is None or not self._is_in_function():
            return None
        operands, slots = self._operands, self._slots
        self._operands, self._slots = (), None
        return operands, slots

    def _is_in_function(self) -> bool:
        """Whether the function that started the call is being traced."""
        return get_opaque_trace_state() == self._trace

    def check_function(self, operation: str) -> None:
        """Requires to be in the function that started the call."""
        if not self._is_in_function():
            raise ValueError(
                f"{operation} must be called in the function that started the call; pass in_flight "
                "as an argument to functions that JAX transforms."
            )


def _vary_like(like: jax.Array, tree: Any) -> Any:
    """The arrays of a pytree, varying over the mesh axes that `like` varies over, too."""
    return vary_alike((), tree, like)[0]


@jax.custom_vjp
def _begin(operands: tuple[jax.Array, ...], slots: CotangentSlots) -> Any:
    """The identity. Its backward waits for the backward's call."""
    return operands, slots


def _begin_bwd(_: None, cotangents: Any) -> Any:
    gradients, slots = cotangents
    ticket = order_after(lax.stop_gradient(slots.ticket), slots.started)
    return tuple(async_done_p.bind(ticket, slots.any_time, *gradients)), slots


_begin.defvjp(lambda *args: (args, None), _begin_bwd)


@jax.custom_vjp
def _enter(args: tuple[Any, ...], ticket: jax.Array) -> tuple[tuple[Any, ...], jax.Array]:
    """The identity. Its backward orders the wait after the backward of the work."""
    return args, ticket


def _enter_bwd(_: None, cotangents: Any) -> tuple[Any, jax.Array]:
    args, ticket = cotangents
    leaves, treedef = jax.tree.flatten(args)
    floats = [x for x in leaves if not _is_of_integers(x)]
    # One barrier: of several, XLA may put the first, and so the wait, before the rest of the work.
    *floats, ticket = lax.optimization_barrier((*floats, ticket))
    ordered = iter(floats)
    leaves = [x if _is_of_integers(x) else next(ordered) for x in leaves]
    return jax.tree.unflatten(treedef, leaves), ticket


_enter.defvjp(lambda *args: (args, None), _enter_bwd)


@jax.custom_vjp
def _leave(result: Any, started: jax.Array) -> tuple[Any, jax.Array]:
    """The identity. Its backward orders the backward of the work after the call's start."""
    return result, started


def _leave_bwd(_: None, cotangents: Any) -> tuple[Any, jax.Array]:
    result, started = cotangents

    def order(x: Any) -> Any:
        return x if _is_of_integers(x) else order_after(x, started)

    return jax.tree.map(order, result), started


_leave.defvjp(lambda *args: (args, None), _leave_bwd)


def _is_of_integers(cotangent: Any) -> bool:
    return cotangent.dtype == jax.dtypes.float0


def start_in_backward(
    start_p: Primitive, arrays: Sequence[jax.Array], params: dict[str, Any], slots: CotangentSlots
) -> tuple[Sequence[jax.Array], CotangentSlots]:
    """Results of a backward's call that are not valid yet, and the cotangents of `slots`."""
    ticket, ready, results = start_call(start_p, arrays, params)
    started = lax.bitcast_convert_type(wait_started(ready), jnp.float32)
    all_started = (_vary_like(ready, started),) * len(slots.started)
    return results, CotangentSlots(ticket, ticket, all_started)
