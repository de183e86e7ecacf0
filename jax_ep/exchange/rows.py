"""Facts of each row of dispatch's output: in use or not, of which group, from which rank.

Rows are ordered by group, then source rank, then token, then k; padding rows end their group. All
of it follows from `row_offsets`, and source ranks also from how many rows each rank sends.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.formats.bits import as_integers
from jax_ep.formats.scales import group_of
from jax_ep.geometry import Geometry

NO_RANK = -1


def row_groups(row_offsets: jax.Array, n_rows: int) -> jax.Array:
    """`int32[C]`: the group of each row; the number of groups for rows that are not in use."""
    ends = jnp.append(row_offsets.astype(jnp.int32), jnp.int32(n_rows))
    return group_of(ends, n_rows)


def row_sources(
    geometry: Geometry,
    group_ids: jax.Array,
    row_offsets: jax.Array,
    n_rows: int,
    all_to_all: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """`int32[C]`: the rank that each row comes from, -1 for rows without a token.

    Each rank tells all others how many rows it sends to each group: one `all_to_all` of
    `int32[R, n_local_groups]`, unless ranks exchange no tokens.
    """
    routed = geometry.routed
    is_group = (group_ids >= 0) & (group_ids < routed.n_groups)
    ids = jnp.where(is_group, group_ids, routed.n_groups).reshape(-1)
    counts = jnp.zeros(routed.n_groups, jnp.int32).at[ids].add(1, mode="drop")
    by_rank = counts.reshape(routed.n_ranks, routed.n_local_groups)
    if not geometry.config.skip_a2a:
        by_rank = all_to_all(by_rank)
    # In each group: where the rows of each rank begin, then the padding rows.
    ends = jnp.cumsum(by_rank.T, axis=1, dtype=jnp.int32)
    begins = row_offsets.astype(jnp.int32)
    parts = begins[:-1, None] + jnp.pad(ends, ((0, 0), (1, 0)))
    part = row_groups(jnp.append(parts.reshape(-1), begins[-1]), n_rows)
    rank = part % (routed.n_ranks + 1)
    has_token = (part < parts.size) & (rank < routed.n_ranks)
    if geometry.config.skip_a2a:
        rank = lax.axis_index(geometry.axis_name)
    return jnp.where(has_token, rank, NO_RANK)


def in_use(row_offsets: jax.Array, n_rows: int) -> jax.Array:
    """`bool[C, 1]`: which rows are in use."""
    return (jnp.arange(n_rows, dtype=row_offsets.dtype) < row_offsets[-1])[:, None]


@jax.custom_jvp
def keep(x: jax.Array, kept: jax.Array) -> jax.Array:
    """`x`, bit by bit, where `kept`, which broadcasts, is True; zero elsewhere.

    Integers are moved: XLA:CPU handles bfloat16 as float32, which changes NaNs.
    """
    integers = as_integers(x)
    bits = jnp.where(kept, integers, jnp.zeros((), integers.dtype))
    return lax.bitcast_convert_type(bits, x.dtype)


@keep.defjvp
def _keep_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return keep(*primals), _where(primals[1], tangents[0])


@jax.custom_jvp
def keep_gradient(x: jax.Array, kept: jax.Array) -> jax.Array:
    """`x`, whose cotangent is zero where `kept` is False, whatever it was."""
    return x


@keep_gradient.defjvp
def _keep_gradient_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return primals[0], _where(primals[1], tangents[0])


def _where(kept: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(kept, x, jnp.zeros((), x.dtype))
