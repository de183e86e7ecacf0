"""The baselines: the contract of dispatch and combine in plain `jax.lax`.

What a JAX user can write without this package. Rows, their order, `row_offsets`,
`src_info`, `n_dropped` and the capacity are those of the contract. Sums are close to
the contract's, not equal in bits: collectives add up in another order, and round.

Each has `dispatch(shapes, tokens, topk_ids)` and
`combine(shapes, rows, received, topk_weights)`, called inside `jax.shard_map` over
`shapes.axis_name` with `check_vma=False`.
"""

from baselines import all_gather, all_to_all

# By name. The last one exists on GPUs only; the one before it is for CPUs.
BASELINES = {
    "lax all_gather": (all_gather.dispatch, all_gather.combine),
    "lax all_to_all": (all_to_all.dispatch_padded, all_to_all.combine),
    "lax ragged_all_to_all": (all_to_all.dispatch_ragged, all_to_all.combine),
}
