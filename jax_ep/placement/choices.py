"""place_choices: which copy of its expert each choice goes to."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.group import EPGroup, check_group
from jax_ep.operands import checks
from jax_ep.placement.expert_placement import ExpertPlacement, check_placement

# 2^32 divided by the golden ratio; and an odd number that sets experts apart.
_BY_TOKEN, _BY_EXPERT = 0x9E3779B9, 0x85EBCA6B


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

    The copy depends on the rank, the token's index and the expert alone. Consecutive tokens take
    copies as multiples of the golden ratio fall into equal parts of [0, 1). So the tokens that
    choose an expert spread evenly over its copies, even if, say, only every second token chooses
    it. With `config.skip_a2a`, all ranks choose alike. With `local_first`, tokens take copies on
    their own rank or node if there are any: fewer rows travel, but balance then depends on the
    placement alone.

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
    # Of all ranks: then XLA makes one GPU kernel of all this, whatever `_ranges` looks up.
    has_copy = (placement.first[-1] > placement.first[0])[experts]
    n_copies = (end - begin)[experts]
    position = begin[experts] + _spread(group, experts, n_copies)
    placed = jnp.where(has_copy, placement.copies.at[position].get(mode="clip"), -1)
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


def _spread(group: EPGroup, experts: jax.Array, n_copies: jax.Array) -> jax.Array:
    """`int32[..., K]`, from 0 to `n_copies` - 1: which of the copies each choice takes."""
    leading = experts.shape[:-1]
    tokens = lax.iota(jnp.uint32, math.prod(leading)).reshape(*leading, 1)
    if not group.config.skip_a2a:
        rank = lax.axis_index(group.axis_name).astype(jnp.uint32)
        tokens += rank * jnp.uint32(math.prod(leading))
    mixed = tokens * jnp.uint32(_BY_TOKEN) + experts.astype(jnp.uint32) * jnp.uint32(_BY_EXPERT)
    return ((mixed >> 16) * n_copies.astype(jnp.uint32) >> 16).astype(jnp.int32)
