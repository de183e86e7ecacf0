"""Calls: what a group's transport does inside traced functions. Bitwise equal on all transports."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jax_ep.exchange.numbers import from_sum_dtype, to_sum_dtype
from jax_ep.exchange.operands import (
    DISPATCH_NAME,
    CombineOperands,
    DispatchOperands,
    DispatchResults,
    Routing,
    empty_rows,
)
from jax_ep.exchange.routing import balance_choices
from jax_ep.geometry import Geometry


class Sends(NamedTuple):
    """Which entries of arrays the ranks send each other, at most U from one to another.

    The i-th ones travel together.
    """

    n: jax.Array  # int32[]: beyond the n-th ones, none counts; the same on all ranks
    entry: jax.Array  # int32[R, U]: of this rank's array, by destination
    got: jax.Array  # int32[R, U]: the entry of this rank's result, by source
    is_got: jax.Array  # bool[R, U]


class Calls(abc.ABC):
    """The calls of a group, for use inside a `jax.shard_map` over its mesh.

    Their operands have been checked and routed. Dispatch, combine and redispatch are
    differentiable. Hashable by identity: a static parameter of traced functions.

    Attributes:
        geometry: of the group.
        lends: whether there are custom calls for copies of experts, in copy_calls.py and
            balance_calls.py.
        may_loop: whether `all_to_all` may be in a loop. XLA:CPU takes a collective of one loop for
            that of another (docs/sharp_bits.md).
    """

    lends = False

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.may_loop = geometry.mesh.devices.flat[0].platform != "cpu"

    @abc.abstractmethod
    def dispatch(self, operands: DispatchOperands) -> DispatchResults:
        """`jax_ep.dispatch`."""

    @abc.abstractmethod
    def combine(self, operands: CombineOperands) -> jax.Array:
        """`jax_ep.combine`."""

    def start(self, operands: DispatchOperands | CombineOperands) -> Any:
        """Starts a call; by default, this is the whole call.

        Returns a pytree with the methods `then` and `run`, which are those of `InFlight`.
        """
        if isinstance(operands, DispatchOperands):
            return Completed(self.dispatch(operands))
        return Completed(self.combine(operands))

    def finish(self, call: Any, operands: Any, after: Any) -> Any:
        """The result of a started call, for use once `after` is computed."""
        return call.result

    def redispatch(self, values: jax.Array, routing: Routing) -> jax.Array:
        """`jax_ep.redispatch`."""
        return redispatch(self, values, routing)

    def send_along(self, values: jax.Array, routing: Routing) -> jax.Array:
        """Redispatch without a derivative; by default, JAX transposes a combine."""
        operands = CombineOperands.unweighted(self.geometry, empty_rows(values, routing), routing)

        def combine(rows: jax.Array) -> jax.Array:
            return self.combine(dataclasses.replace(operands, expert_out=rows))

        _, pull = jax.vjp(combine, operands.expert_out)
        return pull(values)[0]

    def add_up(self, rows: jax.Array, routing: Routing) -> jax.Array:
        """`[T, H]`: the plain sum of each token's rows, in the rows' dtype."""
        terms = to_sum_dtype(rows)
        slices = jnp.split(terms, self.n_slices(terms), axis=1)
        sums = [self.combine(CombineOperands(x, routing)) for x in slices]
        return from_sum_dtype(jnp.concatenate(sums, axis=1), rows.dtype)[: routing.n_tokens]

    def n_slices(self, rows: jax.Array) -> int:
        """Number of combines for rows longer than the experts', as cotangents may be."""
        return 1

    def all_gather(self, x: jax.Array) -> jax.Array:
        """`[R, ...]`, the `x` of all ranks, for what the library shares besides tokens.

        A transport whose calls are asynchronous on CPUs has an exchange of its own: XLA:CPU may
        start its collectives in different orders on different ranks (docs/sharp_bits.md).
        """
        return lax.all_gather(x, self.geometry.axis_name)

    def all_to_all(self, x: jax.Array) -> jax.Array:
        """`[R, ...]` by destination to `[R, ...]` by source; otherwise like `all_gather`."""
        return lax.all_to_all(x, self.geometry.axis_name, 0, 0)

    def balance_choices(self, topk_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`routing.balance_choices`."""
        return balance_choices(self.geometry, topk_ids, self.all_gather)

    def send(self, x: jax.Array, out: jax.Array, sends: Sends) -> jax.Array:
        """`out`, `[S, ...]`, with the entries of all ranks' `x`, `[N, ...]`, that come here."""

        def exchange(i: Any, out: jax.Array) -> jax.Array:
            parts = self.all_to_all(x.at[sends.entry[:, i]].get(mode="clip"))
            got, is_got = sends.got[:, i], sends.is_got[:, i]
            # Each index but once, none beyond is written.
            beyond = out.shape[0] + jnp.arange(got.size, dtype=jnp.int32).reshape(got.shape)
            to = jnp.where(is_got, got, beyond)
            return out.at[to].set(parts, mode="drop", unique_indices=True)

        if not self.may_loop:
            return exchange(slice(None), out)
        return lax.fori_loop(0, sends.n, exchange, out)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Completed:
    """A call that was complete when it was started."""

    result: Any

    def then(self, x: Any) -> Any:
        """`InFlight.then`."""
        return x

    def run(self, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """`InFlight.overlap`."""
        return work(*args)


def _redispatch(calls: Calls, values: jax.Array, routing: Routing) -> jax.Array:
    return checkpoint_name(calls.send_along(values, routing), DISPATCH_NAME)


redispatch = jax.custom_vjp(_redispatch, nondiff_argnums=(0,))


def _redispatch_bwd(calls: Calls, routing: Routing, cotangent: jax.Array) -> tuple[jax.Array, None]:
    return calls.combine(CombineOperands.unweighted(calls.geometry, cotangent, routing)), None


redispatch.defvjp(
    lambda calls, values, routing: (_redispatch(calls, values, routing), routing), _redispatch_bwd
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def straight_through(
    calls: Calls, source_tokens: jax.Array, rows: jax.Array, routing: Routing
) -> jax.Array:
    """`rows`, as if they were the unquantized rows of `source_tokens`, which get the gradient.

    For formats that quantize, and for float16, whose sums travel in another dtype.
    """
    return rows


straight_through.defvjp(
    lambda calls, source_tokens, rows, routing: (rows, routing),
    lambda calls, routing, cotangent: (calls.add_up(cotangent, routing), None, None),
)


def without_gradient(
    call: str, source_tokens: jax.Array, codes: jax.Array, scales: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Codes and scales that `source_tokens` became; raises where a gradient reaches them.

    It would be dropped: `dequantize` has a rule of its own, which takes the gradient past them.
    """
    with jax.disable_jit(False):
        return _codes_and_scales(call, source_tokens, codes, scales)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _identity(call: str, source_tokens: Any, codes: Any, scales: Any) -> Any:
    return codes, scales


def _no_gradient(call: str, _: None, cotangents: Any) -> tuple[None, None, None]:
    def is_zero(cotangent: Any) -> bool:
        is_symbolic = isinstance(cotangent, SymbolicZero)
        return is_symbolic or getattr(cotangent, "dtype", None) == jax.dtypes.float0

    if all(map(is_zero, cotangents)):
        return None, None, None
    raise NotImplementedError(
        f"{call}: tokens and scales of its result are codes, which have no gradient. Take the rows "
        "from jax_ep.dequantize() or call jax_ep.expert_mlp(), whose gradients pass straight "
        "through the rounding; or pass both through jax.lax.stop_gradient()."
    )


_identity.defvjp(
    lambda call, source_tokens, codes, scales: ((codes.value, scales.value), None),
    _no_gradient,
    symbolic_zeros=True,
)
# Under a jit, since a jax.shard_map that runs eagerly has no symbolic zeros.
_codes_and_scales = jax.jit(_identity, static_argnums=0, inline=True)
