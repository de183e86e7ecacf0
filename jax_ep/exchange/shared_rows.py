"""The shared expert's rows of a combine whose sums travel in another dtype than its result.

combine rounds a token's sum before it adds the shared expert's row. There, this happens after the
call: the rows are taken out of the call, and added to its rounded result.
"""

import jax
import jax.numpy as jnp


def split_shared(rows: jax.Array, group_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`[C, H]` without the shared expert's rows, zeros in their place, and these, `[T, H]`.

    They come first, in the order of the tokens that the last choice gives to this rank's shared
    expert. -0, which changes no sum, stands for a row that is missing.
    """
    is_here = group_ids[:, -1] >= 0
    n_shared = jnp.sum(is_here, dtype=jnp.int32)
    row = jnp.where(is_here, jnp.cumsum(is_here, dtype=jnp.int32) - 1, rows.shape[0])
    shared = rows.at[row].get(mode="fill", fill_value=-0.0)
    is_shared = jnp.arange(rows.shape[0], dtype=jnp.int32) < n_shared
    return jnp.where(is_shared[:, None], jnp.zeros((), rows.dtype), rows), shared
