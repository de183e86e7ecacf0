"""Asynchronous calls in traced functions: how they are started and waited for."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jax_ep.exchange.async_primitives import async_done_p, combine_start_p, dispatch_start_p
from jax_ep.exchange.calls import bind_combine, dispatch_call
from jax_ep.exchange.operands import COMBINE_NAME, DISPATCH_NAME, CombineOperands, DispatchOperands
from jax_ep.exchange.overlap import Overlap, after_start, order_after, start_call, wait_started
from jax_ep.ffi.lowering import expect_async_calls
from jax_ep.geometry import Geometry


class InFlightDispatch:
    """A dispatch in flight: a ticket, and results that may not be written yet.

    A pytree of the completed results: flattening waits for the call. So whatever leaves the
    function that started the call, such as a loop carry, is valid. Until then, nothing but the call
    may touch the results: see async_primitives.py.
    """

    def __init__(
        self,
        ticket: jax.Array | None,
        ready: jax.Array | None,
        results: tuple[jax.Array, ...],
        overlap: Overlap | None,
    ) -> None:
        self._ticket, self._ready, self._results = ticket, ready, results
        self.overlap = overlap  # None once the call has left its function

    @classmethod
    def start(
        cls,
        geometry: Geometry,
        operands: DispatchOperands,
        handle_shape: tuple[int, ...],
        start_p: Primitive = dispatch_start_p,
        *further: jax.Array,
    ) -> Self:
        """Starts a dispatch; the first arguments are those of `bind_dispatch`.

        `start_p` takes `further` operands.
        """
        arrays, params = dispatch_call(geometry, lax.stop_gradient(operands), handle_shape)
        ticket, ready, results = start_call(start_p, [*arrays, *further], params)
        # Named, so that under a policy that saves the results, `then` does not rerun the call.
        ready = checkpoint_name(ready, DISPATCH_NAME)
        returns_gradient = geometry.config.token_format.returns_gradient
        overlap = Overlap(operands.differentiable() if returns_gradient else [])
        return cls(ticket, ready, results, overlap)

    def then(self, x: Any) -> Any:
        """`InFlight.then`; `x` itself if the call has completed."""
        # `ready`, not the results: XLA copies a buffer that two instructions use if it cannot order
        # them, possibly before the call has written it.
        if self._ready is None or self.overlap is None:
            return x
        return self.overlap.then(x, self._ready)

    def run(self, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """`InFlight.overlap`; only the work if the call has completed."""
        if self._ready is None or self.overlap is None:
            return work(*args)
        return self.overlap.run(work, args, self._ready)

    def done(self, after: Any = None) -> tuple[jax.Array, ...]:
        """Waits for the results, once `after` and the overlapping work have been computed."""
        if self._ticket is None or self.overlap is None:
            return self._results
        self.overlap.check_function("dispatch_wait")
        ticket = order_after(self._ticket, (after, self.overlap.before_wait))
        # Only once: a second wait would make XLA copy the results, as in `then`.
        self._results = tuple(async_done_p.bind(ticket, self._ticket, *self._results))
        self._ticket = None
        return self._results


jax.tree_util.register_pytree_node(
    InFlightDispatch,
    lambda call: (call.done(), None),
    lambda _, results: InFlightDispatch(None, None, tuple(results), None),
)


class InFlightCombine:
    """A combine in flight. XLA waits for `out` at its first use.

    If it is passed to another function, `then` waits there for the device's last asynchronous call
    instead, if there is one.
    """

    def __init__(self, out: jax.Array, ready: jax.Array, overlap: Overlap | None) -> None:
        self._out, self._ready, self.overlap = out, ready, overlap

    @classmethod
    def start(
        cls, geometry: Geometry, operands: CombineOperands, start_p: Primitive = combine_start_p
    ) -> Self:
        """Starts a combine."""
        expect_async_calls()
        fixed = lax.stop_gradient(operands)
        out, ready = bind_combine(geometry, fixed, start_p)
        ready = checkpoint_name(ready, COMBINE_NAME)
        return cls(out, ready, Overlap(operands.differentiable()))

    def then(self, x: Any) -> Any:
        """`InFlight.then`."""
        if self.overlap is None:
            return after_start(x, wait_started(self._ready), self._ready)
        return self.overlap.then(x, self._ready)

    def run(self, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """`InFlight.overlap`."""
        if self.overlap is None:
            return work(*self.then(args))
        return self.overlap.run(work, args, self._ready)

    def done(self, after: Any = None) -> jax.Array:
        """The result, for use once `after` and the overlapping work have been computed."""
        before = () if self.overlap is None else self.overlap.before_wait
        return order_after(self._out, (after, before))


jax.tree_util.register_pytree_node(
    InFlightCombine,
    lambda call: ((call._out, call._ready), None),
    lambda _, children: InFlightCombine(*children, overlap=None),
)


def finish(
    call: InFlightDispatch | InFlightCombine, operands: Any, after: Any, rule: Callable[..., Any]
) -> Any:
    """Waits for a call, once `after` has been computed.

    rule(operands, result, slots) gives the result with a derivative in the call's operands.
    """
    result = call.done(after)
    overlapped = None if call.overlap is None else call.overlap.take()
    if overlapped is None:
        return rule(operands, result, None)
    given, slots = overlapped
    return rule(operands.replace(given), result, slots)


def finished(results: Sequence[jax.Array], given: Sequence[jax.Array]) -> Any:
    """`results` of a call that was started with `given`, its differentiable operands.

    Has no derivative: the rules of exchange/rules.py wrap it, so only second derivatives
    would need one.
    """
    return _finished_p.bind(*results, *given, n_results=len(results))


_finished_p = Primitive("jax_ep_finished")
_finished_p.multiple_results = True


_finished_p.def_impl(lambda *operands, n_results: list(operands[:n_results]))
_finished_p.def_abstract_eval(lambda *operands, n_results: list(operands[:n_results]))
batching.primitive_batchers[_finished_p] = lambda operands, dims, n_results: (
    list(operands[:n_results]),
    list(dims[:n_results]),
)
mlir.register_lowering(_finished_p, lambda _, *operands, n_results: operands[:n_results])
