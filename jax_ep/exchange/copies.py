"""Weights of experts on ranks that are not their home, and the sums of the gradients of all copies.

Where ranks reach each other's arrays (copy_calls.py), two calls bring each array, and one adds its
gradients. Elsewhere, they travel by `Calls.all_to_all`: in loops, where these are possible, an
expert for each rank at a time, as often as the device finds that it must, and with memory for
gradients of about `_ROUND_BYTES`; otherwise all at once.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_ep.exchange import checks, copy_calls
from jax_ep.exchange.base import Calls, Sends
from jax_ep.exchange.choices import order_of
from jax_ep.formats.bits import from_bytes, to_bytes

# Name of experts' weights that have traveled, for `jax.checkpoint` policies.
EXPERT_COPIES_NAME = "jax_ep_expert_copies"
_NO_GRADIENT: Any = None  # what custom_vjp expects for integers
_ROUND_BYTES = 2**28  # of gradients that a home receives at a time, of one array
Arrays = tuple[jax.Array, ...]


class _Home(NamedTuple):
    """Where the array of a rank, `[first + n, ...]`, has its n experts."""

    first: int
    n: int


def replicate(calls: Calls, weights: Any, held: jax.Array, n_experts: int) -> Any:
    """`[S, ...]` of each array `[E / R, ...]`, the weights of what this rank's slots hold.

    Differentiable: the gradient of an expert is the sum over the ranks that hold it, in their
    order.

    Args:
        calls: of the group.
        weights: a pytree of arrays, those of this rank's experts.
        held: `int32[R, S]`, the expert that each slot of each rank holds; -1 for none, whose
            weights are unspecified. A rank holds an expert at most once.
        n_experts: E.
    """
    home = _Home(0, n_experts // calls.geometry.n_ranks)

    def move(leaf: jax.Array) -> jax.Array:
        return _decode(leaf, _replicate(calls, home, _encode(calls, leaf, held), held))

    return checkpoint_name(jax.tree.map(move, weights), EXPERT_COPIES_NAME)


class Lent(NamedTuple):
    """What `lend` returns."""

    own: Any  # the weights given; only with them, sums of gradients need no pass over all experts
    copies: Any  # `[S, ...]` of each array: what this rank's slots hold of other ranks
    after: jax.Array  # as given, there once all copies can travel


def lend(calls: Calls, weights: Any, held: jax.Array, first: int, after: jax.Array) -> Lent:
    """The weights, and copies of those that other ranks lend this one.

    The gradient of an expert is the sum over its home and the ranks that hold it, in their order.

    Args:
        calls: of the group.
        weights: a pytree of arrays `[first + E / R, ...]`, with this rank's experts at the end.
        held: `int32[R, S]`, experts of other ranks, each at most once; -1 for none, whose weights
            are unspecified.
        first: where the experts begin.
        after: what the device computes before it waits for copies.
    """
    home = _Home(first, calls.geometry.config.n_experts // calls.geometry.n_ranks)
    leaves, treedef = jax.tree.flatten(weights)
    codes = tuple(_encode(calls, leaf, held) for leaf in leaves)
    own, copies, after = _lend(calls, home, codes, held, after)
    copies, after = checkpoint_name((copies, after), EXPERT_COPIES_NAME)
    mine, lent = (
        jax.tree.unflatten(treedef, [*map(_decode, leaves, each)]) for each in (own, copies)
    )
    return Lent(mine, lent, after)


def lend_gradients(
    calls: Calls, weights: jax.Array, held: jax.Array, first: int
) -> tuple[jax.Array, jax.Array]:
    """An array as `lend` gives it, but zeros for the copies: only their gradients travel."""
    weights, held = checks.vary_alike(calls.geometry.axis_names, weights, held)
    home = _Home(first, calls.geometry.config.n_experts // calls.geometry.n_ranks)
    return _lend_gradients(calls, home, weights, held)


def _encode(calls: Calls, leaf: jax.Array, held: jax.Array) -> jax.Array:
    """`leaf` as it travels: codes, which have no gradient, as bytes where collectives need it."""
    # Replicas may hold different experts: then their copies of equal weights differ, too.
    leaf, _ = checks.vary_alike(calls.geometry.axis_names, leaf, held)
    if jnp.issubdtype(leaf.dtype, jnp.floating) and not checks.is_code(leaf.dtype):
        return leaf
    leaf = lax.stop_gradient(leaf)
    return to_bytes(leaf) if checks.is_code(leaf.dtype) else leaf


def _decode(leaf: jax.Array, moved: jax.Array) -> jax.Array:
    return moved if moved.dtype == leaf.dtype else from_bytes(moved, leaf.dtype)


def check_leaf(operation: str, leaf: Any, n_experts: int, letters: str) -> jax.Array:
    """Requires an array `[n_experts, ...]` of numbers."""
    (leaf,) = checks.as_arrays(operation, weights=leaf)
    shape = (n_experts, *(None,) * max(0, leaf.ndim - 1))
    names = " ".join([letters, *("..." for _ in shape[1:])])
    checks.check_array(operation, "weights", leaf, shape, names, jnp.floating, jnp.integer)
    return leaf


def _fetch(
    calls: Calls, home: _Home, weights: Arrays, held: jax.Array, after: jax.Array, kept: Arrays = ()
) -> tuple[Arrays, jax.Array]:
    """`[S, ...]`, what this rank's slots hold of other ranks, else `kept`; and `after`."""
    rank, ranks = _ranks(calls)
    homes = held // home.n
    is_away = (held >= 0) & (homes != ranks)
    results = [*weights]
    reached = [i for i, x in enumerate(weights) if _reaches(calls, x, held.shape[1])]
    if reached:
        entries = jnp.where(is_away & (homes == rank), home.first + held % home.n, -1)
        arrays, others = ([each[i] for i in reached if each] for each in (weights, kept))
        found, after = copy_calls.fetch(calls.geometry, arrays, entries, after, others)
        for i, x in zip(reached, found, strict=True):
            results[i] = x
    if len(reached) < len(weights):
        sends = _sends(home, held, is_away, rank)
    for i, x in enumerate(weights):
        if i not in reached:
            out = kept[i] if kept else jnp.zeros((held.shape[1], *x.shape[1:]), x.dtype)
            operands = x, out, held, after
            x, out, _, after = checks.vary_alike(calls.geometry.axis_names, *operands)
            results[i], after = lax.optimization_barrier((calls.send(x, out, sends), after))
    return tuple(results), after


def _reaches(calls: Calls, x: jax.Array, n_entries: int) -> bool:
    """Whether a custom call takes the array of each rank, rather than collectives."""
    return calls.lends and copy_calls.can_reach(calls.geometry, x, n_entries)


def _sends(home: _Home, held: jax.Array, is_away: jax.Array, rank: jax.Array) -> Sends:
    """What brings all ranks' slots what other ranks have for them."""
    ranks = lax.broadcasted_iota(jnp.int32, (held.shape[0], 1), 0)
    slots = order_of(~is_away, 2)  # of each rank, first those that others fill
    n_away = is_away.sum(1, dtype=jnp.int32)
    is_used = lax.iota(jnp.int32, held.shape[1]) < n_away[rank]
    home_of = (held // home.n)[rank][slots[rank]]
    return Sends(
        n=n_away.max(),
        entry=home.first + jnp.take_along_axis(held, slots, 1) % home.n,
        got=jnp.broadcast_to(slots[rank], held.shape),
        is_got=is_used[None] & (home_of[None] == ranks),
    )


def _ranks(calls: Calls) -> tuple[jax.Array, jax.Array]:
    """This rank, and `int32[R, 1]`, all ranks."""
    shape = (calls.geometry.n_ranks, 1)
    return lax.axis_index(calls.geometry.axis_name), lax.broadcasted_iota(jnp.int32, shape, 0)


class _Returns(NamedTuple):
    """Which experts' gradients travel home, and where they are until then."""

    lent: jax.Array  # int32[R, E / R]: each home's experts, first those that others hold
    n_lent: jax.Array  # int32[R]
    slots: jax.Array  # int32[R, E]: the slot of each rank that holds an expert; S: none


def _plan(home: _Home, held: jax.Array) -> _Returns:
    n_ranks, n_slots = held.shape
    experts = lax.iota(jnp.int32, n_ranks * home.n)
    is_held = held[:, :, None] == experts[None, None]
    slots = jnp.where(is_held.any(1), is_held.argmax(1), n_slots).astype(jnp.int32)
    is_away = (experts // home.n)[None] != lax.iota(jnp.int32, n_ranks)[:, None]
    is_lent = (is_away & (slots < n_slots)).any(0).reshape(n_ranks, home.n)
    return _Returns(order_of(~is_lent, 2), is_lent.sum(1, dtype=jnp.int32), slots)


def _slots_of_home(rank: jax.Array, home: _Home, returns: _Returns) -> jax.Array:
    """`int32[R, E / R]`, the slots of all ranks that hold the experts of this one."""
    return lax.dynamic_slice_in_dim(returns.slots, rank * home.n, home.n, 1)


def _round(
    calls: Calls, returns: _Returns, n_slots: int, n: int, i: jax.Array
) -> tuple[jax.Array, Sends]:
    """What n experts of each home travel in round i.

    Returns:
        `int32[n]`, those of this rank, E / R for none; and what brings their gradients here: rank
        r's of the j-th one becomes entry `j * R + r`.
    """
    rank, ranks = _ranks(calls)
    n_ranks, n_home = returns.lent.shape
    at = i * n + lax.iota(jnp.int32, n)
    is_lent = at[None] < returns.n_lent[:, None]
    experts = returns.lent.at[:, at].get(mode="clip")
    slots = returns.slots[:, ranks * n_home + experts]  # [R, R, n]: of each rank, by home
    is_moved = is_lent[None] & (slots < n_slots) & (ranks != ranks.T)[:, :, None]
    entries = n_ranks * lax.iota(jnp.int32, n)[None] + ranks  # [R, n]
    n_moved = jnp.clip(returns.n_lent.max() - i * n, 0, n)
    sends = Sends(n_moved, slots[rank], entries, is_moved[:, rank])
    return jnp.where(is_lent[rank], experts[rank], n_home), sends


def _add_up(
    calls: Calls, home: _Home, own: jax.Array, gradients: jax.Array, held: jax.Array
) -> jax.Array:
    """`own`, `[first + E / R, ...]`, plus what other ranks' slots, `[S, ...]`, hold of its experts.

    Summed in the order of ranks.
    """
    returns = _plan(home, held)
    n_ranks, n_slots = held.shape
    rank, _ = _ranks(calls)
    slots = _slots_of_home(rank, home, returns)
    entries = jnp.where(slots < n_slots, slots, -1)
    entries = jnp.pad(entries, ((0, 0), (home.first, 0)), constant_values=-1)
    if _reaches(calls, gradients, own.shape[0]) and copy_calls.can_add(gradients):
        return copy_calls.add(calls.geometry, gradients, own, entries)
    n = home.n
    if calls.may_loop:
        n = max(1, min(home.n, _ROUND_BYTES * home.n // max(1, own.nbytes * n_ranks)))
    received = jnp.zeros((n * n_ranks, *own.shape[1:]), own.dtype)
    own, gradients, received = checks.vary_alike(
        calls.geometry.axis_names, own, gradients, received
    )

    def one_round(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        sums, received = carry
        experts, sends = _round(calls, returns, n_slots, n, i)
        received = calls.send(gradients, received, sends)
        at = home.first + experts
        parts = received.reshape(n, n_ranks, *own.shape[1:])
        ones = (1,) * (own.ndim - 1)

        def part(r: int) -> jax.Array:
            others = jnp.where(sends.is_got[r].reshape(n, *ones), parts[:, r], 0)
            return jnp.where(rank == r, sums.at[at].get(mode="clip"), others)

        total = _sum_in_order([part(r) for r in range(n_ranks)])
        beyond = own.shape[0] + lax.iota(jnp.int32, n)  # each but once, none written
        at = jnp.where(experts < home.n, at, beyond)
        return sums.at[at].set(total, mode="drop", unique_indices=True), received

    if not calls.may_loop:
        return one_round(jnp.int32(0), (own, received))[0]
    n_rounds = (returns.n_lent.max() + n - 1) // n
    return lax.fori_loop(0, n_rounds, one_round, (own, received))[0]


def _sum_in_order(values: list[jax.Array]) -> jax.Array:
    """One after the other; `jnp.sum` may take any order."""
    dtype = jnp.float64 if values[0].dtype == jnp.float64 else jnp.float32
    return functools.reduce(jnp.add, [x.astype(dtype) for x in values]).astype(values[0].dtype)


def _lend_all(
    calls: Calls, home: _Home, weights: Arrays, held: jax.Array, after: jax.Array
) -> tuple[Arrays, Arrays, jax.Array]:
    copies, after = _fetch(calls, home, weights, held, after)
    return weights, copies, after


def _lend_bwd(calls: Calls, home: _Home, held: jax.Array, gradients: Any) -> tuple[Any, ...]:
    def sum_up(own: jax.Array, of_copies: jax.Array) -> Any:
        has_one = own.dtype != jax.dtypes.float0  # not those of codes
        return _return(calls, home, own, of_copies, held) if has_one else _NO_GRADIENT

    return tuple(map(sum_up, *gradients[:2])), _NO_GRADIENT, _NO_GRADIENT


def _return_bwd(calls: Calls, home: _Home, held: jax.Array, gradient: jax.Array) -> tuple[Any, ...]:
    (own,), (copies,), _ = _lend(calls, home, (gradient,), held, held)
    return own, copies, _NO_GRADIENT


def _replicate_all(calls: Calls, home: _Home, weights: jax.Array, held: jax.Array) -> jax.Array:
    """`[S, ...]` of `[E / R, ...]`."""
    rank = lax.axis_index(calls.geometry.axis_name)
    at_home = weights[held[rank] % home.n]  # what is not at home here, is overwritten
    ((weights,), _) = _fetch(calls, home, (weights,), held, held, (at_home,))
    return weights


def _sum_all(calls: Calls, home: _Home, gradients: jax.Array, held: jax.Array) -> jax.Array:
    """`[E / R, ...]` of `[S, ...]`: the sums over copies."""
    rank, _ = _ranks(calls)
    mine = _slots_of_home(rank, home, _plan(home, held))[rank]
    own = gradients.at[mine].get(mode="fill", fill_value=0)
    return _add_up(calls, home, own, gradients, held)


def _lend_zeros(
    calls: Calls, home: _Home, weights: jax.Array, held: jax.Array
) -> tuple[jax.Array, jax.Array]:
    zeros = jnp.zeros((held.shape[1], *weights.shape[1:]), weights.dtype)
    return weights, checks.vary_alike(calls.geometry.axis_names, zeros, held)[0]


# Each is the transpose of another.
_lend = jax.custom_vjp(_lend_all, nondiff_argnums=(0, 1))
_return = jax.custom_vjp(_add_up, nondiff_argnums=(0, 1))
_replicate = jax.custom_vjp(_replicate_all, nondiff_argnums=(0, 1))
_sum_copies = jax.custom_vjp(_sum_all, nondiff_argnums=(0, 1))
_lend.defvjp(
    lambda calls, home, x, held, after: (_lend(calls, home, x, held, after), held), _lend_bwd
)
_return.defvjp(
    lambda calls, home, own, x, held: (_return(calls, home, own, x, held), held), _return_bwd
)
_replicate.defvjp(
    lambda calls, home, x, held: (_replicate(calls, home, x, held), held),
    lambda calls, home, held, gradients: (_sum_copies(calls, home, gradients, held), _NO_GRADIENT),
)
_sum_copies.defvjp(
    lambda calls, home, x, held: (_sum_copies(calls, home, x, held), held),
    lambda calls, home, held, gradient: (_replicate(calls, home, gradient, held), _NO_GRADIENT),
)
_lend_gradients = jax.custom_vjp(_lend_zeros, nondiff_argnums=(0, 1))
_lend_gradients.defvjp(
    lambda calls, home, x, held: (_lend_gradients(calls, home, x, held), held),
    lambda calls, home, held, gradients: (_return(calls, home, *gradients, held), _NO_GRADIENT),
)
