"""The baselines: the contract of dispatch and combine in plain `jax.lax`.

This is what a JAX user can write without the package. Rows, their order, `row_offsets`, `src_info`,
`n_dropped` and the capacity follow the contract. Sums are close to the contract's but not equal
bitwise, because collectives add in another order and round more often.

Each baseline has `dispatch(shapes, tokens, topk_ids)` and `combine(shapes, rows, received,
topk_weights)`, called inside `jax.shard_map` over `shapes.axis_name` with `check_vma=False`.
"""

from baselines import all_gather, ragged_all_to_all

# By name. XLA supports the last one on GPUs only.
BASELINES = {
    "lax all_gather": (all_gather.dispatch, all_gather.combine),
    "lax ragged_all_to_all": (ragged_all_to_all.dispatch, ragged_all_to_all.combine),
}
