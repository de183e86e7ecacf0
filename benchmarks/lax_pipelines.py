"""The rivals: the contract in plain `jax.lax`, as fast as we could make it.

What a JAX user can write without this package. Rows, their order, `row_offsets`,
`src_info`, `n_dropped` and `recv_capacity` are the contract's; combine is close, not
equal in bits, as ranks' sums are added by a collective. Each module says how it works
and which variants were slower. `jax.lax.ragged_all_to_all` does not exist on CPU.

Found out about XLA:CPU (8 devices, 2 cores), besides what lax_rows.py says:

* No loop over the rows in use: XLA zeroes and copies the carried `[C, H]` array, which
  costs more than to gather all C rows.
* Gradients by `custom_vjp`, as in the package: the backward of one is the other. JAX's
  own would scatter rows.

Each pipeline has `dispatch(shapes, tokens, topk_ids)` and
`combine(shapes, rows, received, topk_weights)`; to be called inside `jax.shard_map`
over `shapes.axis_name`, with `check_vma=False`.
"""

from __future__ import annotations

import types

import lax_all_gather
import lax_all_to_all

PIPELINES: dict[str, types.ModuleType] = {
    "lax all_gather": lax_all_gather,
    "lax all_to_all": lax_all_to_all,
}
