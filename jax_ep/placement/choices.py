"""place_choices: which copy of its expert each choice goes to."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.exchange import checks
from jax_ep.exchange.choices import positions
from jax_ep.group import EPGroup, check_group
from jax_ep.placement.expert_placement import ExpertPlacement, check_placement

# 2^32 divided by the golden ratio; and an odd number that sets experts apart.
_BY_RANK, _BY_EXPERT = 0x9E3779B9, 0x85EBCA6B


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
    # Of all ranks: then XLA makes one GPU kernel of all but the positions, even with `_ranges`.
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
