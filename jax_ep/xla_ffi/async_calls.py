"""Asynchronous calls in traced functions: how they are started, ordered and waited for."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive, get_opaque_trace_state
from jax.interpreters import batching, mlir

from jax_ep.geometry import Geometry
from jax_ep.operands import COMBINE_NAME, DISPATCH_NAME, CombineOperands, DispatchOperands
from jax_ep.xla_ffi.async_primitives import (
    combine_start_p,
    dispatch_done_p,
    dispatch_start_p,
    wait_started_p,
)
from jax_ep.xla_ffi.lowering import expect_async_calls
from jax_ep.xla_ffi.primitives import bind_combine, dispatch_call


class InFlightDispatch:
    """A dispatch in flight: a ticket, and results that may not be written yet.

    A pytree of the completed results: flattening waits for the call. So whatever leaves the
    function that started the call, such as a loop carry, is valid. Until then, nothing but the call
    may touch the results: see async_primitives.py.
    """

    def __init__(self, ticket: jax.Array, ready: jax.Array, results: tuple[jax.Array, ...]) -> None:
        self._ticket: jax.Array | None = ticket
        self._ready: jax.Array | None = ready
        self._results, self._trace = results, get_opaque_trace_state()

    @classmethod
    def start(
        cls, geometry: Geometry, operands: DispatchOperands, handle_shape: tuple[int, ...]
    ) -> Self:
        """Starts a dispatch; the arguments are those of `bind_dispatch`."""
        expect_async_calls()
        arrays, params = dispatch_call(geometry, lax.stop_gradient(operands), handle_shape)
        ticket, ready, *results = dispatch_start_p.bind(*arrays, **params)
        # Named, so that under a policy that saves the results, `then` does not rerun the call.
        return cls(ticket, checkpoint_name(ready, DISPATCH_NAME), tuple(results))

    def then(self, x: Any) -> Any:
        """See `InFlight.then`; `x` itself if the call has completed."""
        # `ready`, not the results: XLA copies a buffer that two instructions use if it cannot order
        # them, possibly before the call has written it.
        return x if self._ready is None else _after_start(x, self._ready)

    def done(self, after: Any = None) -> tuple[jax.Array, ...]:
        """Waits for the results, once `after` has been computed."""
        if self._ticket is None:
            return self._results
        if get_opaque_trace_state() != self._trace:
            raise ValueError(
                "dispatch_wait must be called in the function that called dispatch_async; pass "
                "in_flight as an argument to functions that JAX transforms."
            )
        ticket = order_after(self._ticket, after)
        # Only once: a second wait would make XLA copy the results, as in `then`.
        self._results = tuple(dispatch_done_p.bind(ticket, *self._results))
        self._ticket = None
        return self._results

    @classmethod
    def _unflatten(cls, _: None, results: Any) -> Self:
        call = cls.__new__(cls)
        call._ticket, call._ready, call._results = None, None, tuple(results)
        return call


jax.tree_util.register_pytree_node(
    InFlightDispatch, lambda call: (call.done(), None), InFlightDispatch._unflatten
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InFlightCombine:
    """A combine in flight. XLA waits for `out` at its first use.

    If `ready` is passed to another function, `then` waits there for the device's last asynchronous
    call instead, if there is one.
    """

    out: jax.Array
    ready: jax.Array

    @classmethod
    def start(cls, geometry: Geometry, operands: CombineOperands) -> Self:
        """Starts a combine."""
        expect_async_calls()
        fixed = lax.stop_gradient(operands)
        out, ready = bind_combine(geometry, fixed, combine_start_p)
        return cls(out, checkpoint_name(ready, COMBINE_NAME))

    def then(self, x: Any) -> Any:
        """See `InFlight.then`."""
        return _after_start(x, self.ready)

    def done(self, after: Any = None) -> jax.Array:
        """The result, for use once `after` has been computed."""
        return order_after(self.out, after)


def _after_start(x: Any, ready: jax.Array) -> Any:
    """`x`, a pytree, available once the blocks of the call are resident on the GPU."""
    (started,) = wait_started_p.bind(order_after(jnp.int32(0), ready))
    return jax.tree.map(lambda leaf: order_after(leaf, (started, ready)), x)


def order_after(x: jax.Array, after: Any) -> jax.Array:
    """`x`, available only once `after`, a pytree, has been computed."""
    return x if after is None else _order_after(x, lax.stop_gradient(after))


@jax.custom_jvp
def _order_after(x: jax.Array, after: Any) -> jax.Array:
    return lax.optimization_barrier((x, after))[0]


@_order_after.defjvp
def _order_after_jvp(primals: Any, tangents: Any) -> Any:
    x, dx = _order_after(*primals), tangents[0]
    # With jax 0.10, x also varies over the mesh axes that `after` varies over.
    missing = jax.typeof(x).mat.varying - jax.typeof(primals[0]).mat.varying
    return x, lax.pcast(dx, tuple(sorted(missing)), to="varying") if missing else dx


def finished(results: Sequence[jax.Array], given: Sequence[jax.Array]) -> Any:
    """`results` of a call that was started with `given`, its differentiable operands.

    Has no derivative: autodiff.py's rules wrap it, so only second derivatives would need one.
    """
    return _finished_p.bind(*results, *given, n_results=len(results))


_finished_p = Primitive("jax_ep_finished")
_finished_p.multiple_results = True


@_finished_p.def_impl
@_finished_p.def_abstract_eval
def _first_operands(*operands: Any, n_results: int) -> list[Any]:
    return list(operands[:n_results])


def _batch_finished(operands: Any, dims: Any, n_results: int) -> Any:
    return list(operands[:n_results]), list(dims[:n_results])


batching.primitive_batchers[_finished_p] = _batch_finished
mlir.register_lowering(_finished_p, lambda _, *operands, n_results: operands[:n_results])
