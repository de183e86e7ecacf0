"""The start of an asynchronous call, and the barriers that order it and other work."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from jax_ep.xla_ffi.async_primitives import wait_started_p
from jax_ep.xla_ffi.lowering import expect_async_calls


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
