"""replicate_experts: the weights of a rank's physical experts, from the homes of logical ones."""

from typing import Any

import jax

from jax_ep.exchange.copies import check_leaf, replicate
from jax_ep.group import EPGroup, calls_of, check_group
from jax_ep.placement.expert_placement import ExpertPlacement, check_placement


def replicate_experts(group: EPGroup, weights: Any, placement: ExpertPlacement) -> Any:
    """Brings the weights of logical experts to the ranks of their copies; in `jax.shard_map`.

    Differentiable, any number of times: the gradient of a logical expert is the sum of its copies'
    gradients in ascending order of physical experts, in float32 (float64 for float64),
    rounded once. It has the same bits in every run.

    On `p2p`, if all ranks are in one process, copy engines send what a rank lacks. Elsewhere,
    weights travel by collectives of XLA or, on `host`, by calls of the group: in as many rounds as
    the rank with the most copies from elsewhere has of these, a rank receives R entries each, of
    which it needs one; `rebalance` keeps them few. The results have the name `EXPERT_COPIES_NAME`:
    `jax.checkpoint` keeps them for the backward if its policy says so, and otherwise the weights
    travel again.

    Args:
        group: of `n_experts` = P; the weights travel along its axes.
        weights: a pytree of arrays `[E / R, ...]`: the weights of the logical experts from
            `rank * E / R` on, in any dtype. Integers, and numbers of fewer than 16 bits such as the
            codes of `quantize_weights`, have no gradient.
        placement: which expert is where; the same on all ranks.

    Returns:
        `[P / R, ...]`: the weights of this rank's physical experts, as `expert_mlp` takes them.

    Raises:
        TypeError: `group` is not a group, `placement` not an `ExpertPlacement`, or a leaf of
            `weights` not an array. While tracing.
        ValueError: the leading dimension of a leaf of `weights` is not E / R; the placement does
            not fit the group; the group is closed, or the call is outside `jax.shard_map`. While
            tracing.
    """
    call = check_group("replicate_experts", group)
    check_placement(call, group, placement)
    n_experts, n_ranks = placement.n_experts, group.n_ranks
    weights = jax.tree.map(lambda x: check_leaf(call, x, n_experts // n_ranks, "E/R"), weights)
    held = placement.physical_to_logical.reshape(n_ranks, -1)
    return replicate(calls_of(group), weights, held, n_experts)
