"""ExpertPlacement, which says where copies of experts are; place_choices, which chooses copies."""

import functools
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep.config import check_count
from jax_ep.exchange import checks
from jax_ep.exchange.choices import order_of, positions
from jax_ep.group import EPGroup, check_group

# 2^32 divided by the golden ratio; and an odd number that sets experts apart.
_BY_RANK, _BY_EXPERT = 0x9E3779B9, 0x85EBCA6B


@jax.tree_util.register_pytree_with_keys_class
class ExpertPlacement:
    """Which logical expert each physical expert is a copy of; a pytree.

    Rank r holds the physical experts from `r * P / R` to `(r + 1) * P / R - 1`, and logical expert
    e has its home, where its parameters are stored, on rank `e // (E / R)`. Placements of equal
    sizes are equal to `jax.jit`: a function that takes one as an argument is compiled once.

    Args:
        physical_to_logical: integers `[P]`, such as `rebalance` returns; concrete, not traced. P
            and E must be multiples of R. Each logical expert from 0 to E - 1 must have a copy, and
            at most one on each rank.
        n_ranks: R.
        local_first: whether a choice prefers a copy on the token's own rank, then one on its node.
            Static.

    Raises:
        TypeError: `physical_to_logical` is not an array of numbers, or is traced.
        ValueError: `physical_to_logical` breaks a rule above, or another argument is invalid.

    Attributes:
        physical_to_logical: `int32[P]`.
        copies: `int32[P]`, physical experts, ordered by their logical expert, then ascending; those
            that no choice may go to come last.
        first: `int32[R + 1, E]`; the entry for rank r and logical expert e is the index in `copies`
            of the first copy of e on rank r or later. Row R has the ends: the index after the last
            copy of each expert.
        n_ranks: R.
        local_first: as given.
    """

    physical_to_logical: jax.Array
    copies: jax.Array
    first: jax.Array
    n_ranks: int
    local_first: bool

    def __init__(
        self, physical_to_logical: Any, n_ranks: int, *, local_first: bool = False
    ) -> None:
        n_ranks = check_count("n_ranks", n_ranks)
        (local_first,) = checks.check_flags("ExpertPlacement", local_first=local_first)
        logical = _check_logical(physical_to_logical, n_ranks)
        n_experts = int(logical.max()) + 1
        self.n_ranks, self.local_first = n_ranks, local_first
        # Explicit transfers: no `jax.transfer_guard("disallow")` stops them.
        self.physical_to_logical, everywhere = jax.device_put((logical, np.ones(n_ranks, bool)))
        self.copies, self.first = _tables(self.physical_to_logical, everywhere, n_experts)

    @property
    def n_experts(self) -> int:
        """Logical experts (E)."""
        return self.first.shape[-1]

    @property
    def n_physical(self) -> int:
        """Physical experts (P), the `n_experts` of the group's config."""
        return self.physical_to_logical.shape[-1]

    def mask_ranks(self, mask: jax.Array | np.ndarray) -> Self:
        """A placement like this one, in which choices use only the copies on some ranks.

        Weights stay where they are, and so do shapes: a function that is compiled for one mask
        serves them all. The new mask replaces any earlier one.

        Args:
            mask: `bool[R]` or integers, False or 0 for ranks that are to get no rows. Its values
                may be traced.

        Raises:
            TypeError: `mask` is not an array.
            ValueError: its shape or dtype does not fit.
        """
        call = "ExpertPlacement.mask_ranks"
        if isinstance(mask, np.ndarray) and mask.dtype.itemsize < 8:
            mask = jax.device_put(mask)  # explicitly, see __init__
        (mask,) = checks.as_arrays(call, mask=mask)
        checks.check_array(call, "mask", mask, (self.n_ranks,), "R", jnp.bool_, jnp.integer)
        tables = _tables(self.physical_to_logical, mask.astype(bool), self.n_experts)
        return self.tree_unflatten(
            (self.n_ranks, self.local_first), (self.physical_to_logical, *tables)
        )

    def logical_load(self, load: Any) -> np.ndarray:
        """The load of each logical expert: the sum over its copies; on the host.

        Args:
            load: `[..., P]`, of physical experts, such as `RankStats.rows_to_expert`.

        Returns:
            `[..., E]`, for `rebalance`, in the dtype of `load`.

        Raises:
            TypeError: `load` is traced.
            ValueError: the last dimension is not P.
        """
        call = "ExpertPlacement.logical_load"
        load = checks.as_values(call, "load", load, "Call it outside of jax.jit.")
        if load.ndim < 1 or load.shape[-1] != self.n_physical:
            raise ValueError(
                f"{call}: load must have the shape [..., P={self.n_physical}]; got {load.shape}."
            )
        logical = np.zeros((self.n_experts, *load.shape[:-1]), load.dtype)
        np.add.at(logical, jax.device_get(self.physical_to_logical), np.moveaxis(load, -1, 0))
        return np.moveaxis(logical, 0, -1)

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """For JAX."""
        names = "physical_to_logical", "copies", "first"
        children = [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names]
        return children, (self.n_ranks, self.local_first)

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> Self:
        """For JAX."""
        self = object.__new__(cls)
        self.physical_to_logical, self.copies, self.first = children
        self.n_ranks, self.local_first = static
        return self

    def __repr__(self) -> str:
        return (
            f"ExpertPlacement({self.physical_to_logical!r}, n_ranks={self.n_ranks}, "
            f"local_first={self.local_first})"
        )


def check_is_placement(operation: str, placement: Any) -> None:
    """Requires a placement."""
    if not isinstance(placement, ExpertPlacement):
        raise TypeError(
            f"{operation}: placement must be an ExpertPlacement; got {type(placement).__name__}."
        )


def check_placement(operation: str, group: EPGroup, placement: Any) -> None:
    """Requires a placement of the group's experts on its ranks."""
    check_is_placement(operation, placement)
    sizes = placement.n_physical, placement.n_ranks
    if sizes != (group.config.n_experts, group.n_ranks):
        raise ValueError(
            f"{operation}: the placement must be of the group's experts and ranks: "
            f"P=n_experts={group.config.n_experts}, R={group.n_ranks}; got P={sizes[0]}, "
            f"R={sizes[1]}."
        )
    if placement.local_first and group.config.skip_a2a:
        raise ValueError(
            f"{operation}: a placement with local_first cannot serve a group with skip_a2a: all "
            "ranks must choose the same copy of an expert for their common tokens."
        )


def _check_logical(given: Any, n_ranks: int) -> np.ndarray:
    """`int32[P]`, with each expert at least once, and at most once on a rank."""
    name = "ExpertPlacement: physical_to_logical"
    advice = "Make the placement outside of jax.jit, and pass it as an argument."
    logical = checks.as_values("ExpertPlacement", "physical_to_logical", given, advice)
    if logical.ndim != 1 or not np.issubdtype(logical.dtype, np.integer):
        raise TypeError(f"{name} must be integers [P]; got {logical.dtype.name}{logical.shape}.")
    if logical.size == 0 or logical.size % n_ranks:
        raise ValueError(
            f"{name} must have a multiple of n_ranks={n_ranks} entries; got {logical.size}."
        )
    n_experts = int(logical.max()) + 1
    # If there are more experts than entries, one below the number of entries is missing.
    missing = sorted(set(range(min(n_experts, logical.size))) - set(logical.tolist()))
    if missing or logical.min() < 0:
        what = f"expert {missing[0]} is missing" if missing else f"got {logical.min()}"
        raise ValueError(f"{name} must name each of the experts 0 to {n_experts - 1}; {what}.")
    if n_experts % n_ranks:
        raise ValueError(
            f"{name} must name a multiple of n_ranks={n_ranks} experts; got {n_experts}."
        )
    for rank, held in enumerate(logical.reshape(n_ranks, -1)):
        experts, counts = np.unique(held, return_counts=True)
        if counts.max() > 1:
            raise ValueError(
                f"{name} must name an expert at most once on each rank; rank {rank} has "
                f"{counts.max()} copies of expert {experts[counts.argmax()]}."
            )
    return logical.astype(np.int32)


@functools.partial(jax.jit, static_argnums=2)
def _tables(
    logical: jax.Array, is_served: jax.Array, n_experts: int
) -> tuple[jax.Array, jax.Array]:
    """`copies` and `first`, of the ranks that are served."""
    n_ranks = is_served.shape[0]
    served = jnp.repeat(is_served, logical.shape[0] // n_ranks)
    keys = jnp.where(served, logical, n_experts)
    experts = lax.broadcasted_iota(jnp.int32, (1, n_experts), 1)
    held = (keys[:, None] == experts).reshape(n_ranks, -1, n_experts).sum(1, dtype=jnp.int32)
    totals = held.sum(0)
    before = jnp.cumsum(totals) - totals  # copies of earlier experts
    first = before[None] + jnp.concatenate([jnp.zeros_like(held[:1]), jnp.cumsum(held, axis=0)])
    return order_of(keys, n_experts + 1), first.astype(jnp.int32)


class PlacedChoices(NamedTuple):
    """What `place_choices` returns.

    Attributes:
        topk_ids: `int32[..., K]`, physical experts, for `dispatch`.
        n_unserved: `int32[]`, choices of this rank's tokens whose expert has copies on masked ranks
            only (`ExpertPlacement.mask_ranks`); their id is -1.
    """

    topk_ids: jax.Array
    n_unserved: jax.Array


def place_choices(group: EPGroup, topk_ids: jax.Array, placement: ExpertPlacement) -> PlacedChoices:
    """Chooses a physical expert for each choice of a logical one; inside `jax.shard_map`.

    The choices of an expert, in the order of this rank's tokens, take its copies in turn: whichever
    tokens choose it, the copies get equally many choices of this rank, up to one. The rank and the
    expert decide which copy is first. With `config.skip_a2a`, all ranks choose alike. With
    `local_first`, tokens take copies on their own rank or node if there are any: fewer rows travel,
    but balance then depends on the placement alone.

    Args:
        group: the group of the dispatch, of `n_experts` = P.
        topk_ids: `[..., K]`, logical experts: integers of any dtype; -1 = none. Other ids outside
            `[0, E)` become P, so that `dispatch` counts them as invalid.
        placement: from logical to physical experts.

    Raises:
        TypeError: `group` is not a group, or `placement` not an `ExpertPlacement`. While tracing.
        ValueError: `topk_ids` are not integers; the placement does not fit the group, or has
            `local_first` while the group has `skip_a2a`; the group is closed, or the call is
            outside `jax.shard_map`. While tracing.
    """
    call = check_group("place_choices", group)
    check_placement(call, group, placement)
    (ids,) = checks.as_arrays(call, topk_ids=topk_ids)
    shape = (None,) * max(1, 0 if ids is None else ids.ndim)
    checks.check_array(call, "topk_ids", ids, shape, "K", jnp.integer)
    ids = lax.stop_gradient(checks.as_int32(ids))
    begin, end = _ranges(group, placement)
    is_expert = (ids >= 0) & (ids < placement.n_experts)
    experts = jnp.where(is_expert, ids, 0)
    # Copies on all ranks: then XLA makes one GPU kernel of all but the positions.
    has_copy = (placement.first[-1] > placement.first[0])[experts]
    n_copies = (end - begin)[experts]
    turns = positions(ids.reshape(-1), placement.n_experts).reshape(ids.shape)
    turn = (_first_turn(group, experts, n_copies) + turns) % jnp.maximum(n_copies, 1)
    placed = placement.copies.at[begin[experts] + turn].get(mode="clip")
    placed = jnp.where(has_copy, placed, -1)
    others = jnp.where(ids == -1, -1, placement.n_physical)
    is_unserved = is_expert & ~has_copy
    return PlacedChoices(jnp.where(is_expert, placed, others), is_unserved.sum(dtype=jnp.int32))


def _ranges(group: EPGroup, placement: ExpertPlacement) -> tuple[jax.Array, jax.Array]:
    """`int32[E]` each: where in `copies` those begin and end that this rank's tokens go to."""
    first = placement.first
    begin, end = first[0], first[-1]
    if not placement.local_first:
        return begin, end
    rank = lax.axis_index(group.axis_name)
    per_node, _ = group.config.nodes(group.n_ranks)
    node = rank // per_node * per_node
    for low, high in ((node, node + per_node), (rank, rank + 1)):
        has_copies = first[high] > first[low]
        begin, end = (
            jnp.where(has_copies, first[low], begin),
            jnp.where(has_copies, first[high], end),
        )
    return begin, end


def _first_turn(group: EPGroup, experts: jax.Array, n_copies: jax.Array) -> jax.Array:
    """From 0 to `n_copies` - 1: which copy the first choice of an expert takes on this rank.

    Multiples of the golden ratio, modulo 1, as fractions of the copies: ranks spread over them.
    """
    mixed = experts.astype(jnp.uint32) * jnp.uint32(_BY_EXPERT)
    if not group.config.skip_a2a:
        rank = lax.axis_index(group.axis_name).astype(jnp.uint32)
        mixed += rank * jnp.uint32(_BY_RANK)
    return ((mixed >> 16) * n_copies.astype(jnp.uint32) >> 16).astype(jnp.int32)
