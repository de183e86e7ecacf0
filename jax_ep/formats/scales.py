"""Where the scales of rows are: row by row, transposed, or in 128 x 4 atoms.

C rows in L groups, S scales per row. Group i is the rows `row_offsets[i]` to `row_offsets[i + 1]`.
"""

import jax
import jax.numpy as jnp

from jax_ep.formats.bits import as_integers

BLOCK_ROWS = 128  # of an atom
_ATOM_SCALES = 4
_ATOM_LANES = 32  # rows r, r + 32, r + 64 and r + 96 of an atom are adjacent


class ScalesLayout:
    """A layout of the scales in the output of dispatch: here row by row, `[C, S]`.

    Attributes:
        name: in attributes and messages.
        row_alignment: every group of rows begins at a multiple of it.
    """

    name = "row_major"
    row_alignment = 1

    def shape(self, n_rows: int, n_scales: int, n_groups: int) -> tuple[int, ...]:
        """Shape of the array."""
        return (n_rows, n_scales)

    def place(self, scales: jax.Array, row_offsets: jax.Array) -> jax.Array:
        """The array, from `[C, S]` row by row."""
        return scales

    def by_row(
        self, array: jax.Array, row_offsets: jax.Array, n_rows: int, n_scales: int
    ) -> jax.Array:
        """`[C, S]` row by row, from the array; unused rows are unspecified."""
        return array

    def in_use(self, array: jax.Array, row_offsets: jax.Array) -> jax.Array:
        """Which elements belong to rows in use: boolean, of a shape that broadcasts to the array's.

        Scales that fill a block of atoms count as in use.
        """
        return _up_to(row_offsets[-1], array.shape[0])[:, None]

    def offsets(self, row_offsets: jax.Array) -> jax.Array | None:
        """`uint32[L]` `scales_offsets`; None if a row's scales follow from its index."""
        return None


class _NoScales(ScalesLayout):
    name = "none"

    def shape(self, n_rows: int, n_scales: int, n_groups: int) -> tuple[int, ...]:
        return (0,)


class _Transposed(ScalesLayout):
    """`[S, C]`; groups begin at multiples of 4 rows, i.e. 16 bytes of float32 scales."""

    name = "transposed"
    row_alignment = 4

    def shape(self, n_rows: int, n_scales: int, n_groups: int) -> tuple[int, ...]:
        return (n_scales, n_rows)

    def place(self, scales: jax.Array, row_offsets: jax.Array) -> jax.Array:
        return scales.T

    def in_use(self, array: jax.Array, row_offsets: jax.Array) -> jax.Array:
        return _up_to(row_offsets[-1], array.shape[1])

    def by_row(
        self, array: jax.Array, row_offsets: jax.Array, n_rows: int, n_scales: int
    ) -> jax.Array:
        return array.T


class _Atoms(ScalesLayout):
    """`[blocks, ceil(S / 4), 32, 4, 4]`: what tcgen05 and cuBLAS read.

    Scale c of row r of a block is at `[block, c / 4, r % 32, r / 32, c % 4]`. Each group starts a
    new block.
    """

    name = "atoms"

    def shape(self, n_rows: int, n_scales: int, n_groups: int) -> tuple[int, ...]:
        n_blocks = -(-(n_rows + n_groups * BLOCK_ROWS) // BLOCK_ROWS)
        tile = (_ATOM_LANES, BLOCK_ROWS // _ATOM_LANES, _ATOM_SCALES)
        return (n_blocks, -(-n_scales // _ATOM_SCALES), *tile)

    def in_use(self, array: jax.Array, row_offsets: jax.Array) -> jax.Array:
        is_of_group = _up_to(first_blocks(row_offsets)[-1], array.shape[0])
        return is_of_group.reshape(-1, 1, 1, 1, 1)

    def offsets(self, row_offsets: jax.Array) -> jax.Array:
        """First block of each group, minus the block of its first row among all rows."""
        blocks = row_offsets[:-1].astype(jnp.int32) // BLOCK_ROWS
        return (first_blocks(row_offsets)[:-1] - blocks).astype(jnp.uint32)

    def place(self, scales: jax.Array, row_offsets: jax.Array) -> jax.Array:
        n_rows, n_scales = scales.shape
        shape = self.shape(n_rows, n_scales, row_offsets.shape[0] - 1)
        row = rows_of_blocks(row_offsets, shape[0], n_rows)
        padding = shape[1] * _ATOM_SCALES - n_scales
        # As integers: XLA converts small floats to larger ones to gather them.
        integers = jnp.pad(as_integers(scales), ((0, 0), (0, padding)))
        taken = integers.at[row].get(mode="fill", fill_value=0)
        tiles = taken.reshape(shape[0], shape[3], shape[2], shape[1], shape[4])
        atoms = jnp.transpose(tiles, (0, 3, 2, 1, 4))
        return jax.lax.bitcast_convert_type(atoms, scales.dtype)

    def by_row(
        self, array: jax.Array, row_offsets: jax.Array, n_rows: int, n_scales: int
    ) -> jax.Array:
        row = jnp.arange(n_rows, dtype=jnp.int32)
        firsts, starts = first_blocks(row_offsets), row_offsets.astype(jnp.int32)
        group = group_of(starts, n_rows)
        tiles = as_integers(array).transpose(0, 3, 2, 1, 4)
        rows = tiles.reshape(array.shape[0] * BLOCK_ROWS, -1)
        index = firsts[group] * BLOCK_ROWS + row - starts[group]
        by_row = rows.at[index].get(mode="fill", fill_value=0)[:, :n_scales]
        return jax.lax.bitcast_convert_type(by_row, array.dtype)


def rows_of_blocks(row_offsets: jax.Array, n_blocks: int, n_rows: int) -> jax.Array:
    """`int32[n_blocks, 128]`: the rows of each block; `n_rows` where a block has no more.

    Each group of rows starts a new block.
    """
    block = jnp.arange(n_blocks, dtype=jnp.int32)
    firsts, starts = first_blocks(row_offsets), row_offsets.astype(jnp.int32)
    group = group_of(firsts, n_blocks)
    first_row = starts[group] + (block - firsts[group]) * BLOCK_ROWS
    row = first_row[:, None] + jnp.arange(BLOCK_ROWS, dtype=jnp.int32)[None]
    return jnp.where(row < starts[group + 1][:, None], row, n_rows)


def first_blocks(row_offsets: jax.Array) -> jax.Array:
    """`int32[L + 1]`: the first block of rows of each group, then the number of blocks."""
    sizes = jnp.diff(row_offsets.astype(jnp.int32))
    blocks = jnp.cumsum((sizes + BLOCK_ROWS - 1) // BLOCK_ROWS, dtype=jnp.int32)
    return jnp.concatenate([jnp.zeros_like(blocks[:1]), blocks])


def _up_to(end: jax.Array, n: int) -> jax.Array:
    """`bool[n]`: which of 0 to n - 1 are less than `end`."""
    return jnp.arange(n, dtype=end.dtype) < end


def group_of(starts: jax.Array, n: int) -> jax.Array:
    """`int32[n]`: the group that each of 0 to n - 1 falls into; the last one beyond all groups.

    `jnp.searchsorted` does the same in up to 4 times the time; before jax 0.12, it fails under a
    `vmap` with `spmd_axis_name`.
    """
    ends_here = jnp.zeros(n, jnp.int32).at[starts[1:]].add(1, mode="drop")
    n_ended = jnp.cumsum(ends_here, dtype=jnp.int32)
    return jnp.minimum(n_ended, starts.shape[0] - 2)


NO_SCALES = _NoScales()
ROW_MAJOR = ScalesLayout()
TRANSPOSED = _Transposed()
ATOMS = _Atoms()
