"""Rows as e4m3 codes for gradients in FP8: along rows, along columns, or both in one pass.

A scale belongs to 128 elements along the axis that a matmul sums over. The arithmetic is that of
`BlockwiseFP8`, but scales may be smaller, since gradients may. The gradient of rows sums along
rows; that of weights, over the rows of a group, column by column. All rows of a block belong to one
group, and zeros fill the last block of each.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir

from jax_ep.ffi.lowering import custom_call, fusion_barrier, like, make_primitive
from jax_ep.formats import BlockwiseFP8
from jax_ep.formats.bits import as_integers
from jax_ep.formats.scales import BLOCK_ROWS, rows_of_blocks
from jax_ep.layer.matmul.calls import dequantize_rows
from jax_ep.layer.matmul.choose import Implementation, Operation, Work, choose

_TARGET = "jax_ep_quantize_rows"
_CODE = np.dtype(jnp.float8_e4m3fn)


@dataclasses.dataclass(frozen=True)
class _Format(BlockwiseFP8):
    min_amax = 2.0**-80  # kMinGradientAmax in C++


class Codes(NamedTuple):
    """Codes and scales of rows, `[C, n]`.

    Along rows, codes are `[C, n]` and scales `[n / 128, C]`. Along columns, for B blocks of rows,
    of which the first ones are in use, codes are `[n, 128 B]` and scales `[B, n]`.
    """

    codes: jax.Array
    scales: jax.Array


class BothCodes(NamedTuple):
    """The codes that were asked for; None for the others."""

    along_rows: Codes | None
    along_columns: Codes | None


def quantize_rows(
    rows: jax.Array,
    row_offsets: jax.Array,
    scales: jax.Array | None = None,
    *,
    along_rows: bool = False,
    along_columns: bool = False,
) -> BothCodes:
    """Quantizes bfloat16 rows, `[C, n]`, or those that codes with `[n / 128, C]` scales stand for.

    n is a multiple of 128. Rows of no group may hold NaN: they are in no block of rows, and their
    codes along rows are unspecified.
    """
    operands = (rows, row_offsets) if scales is None else (rows, row_offsets, scales)
    flags = dict(along_rows=along_rows, along_columns=along_columns)
    results = quantize_rows_p.bind(*operands, **flags) if any(flags.values()) else []
    pairs = iter([Codes(*results[i : i + 2]) for i in range(0, len(results), 2)])
    return BothCodes(*(next(pairs) if flag else None for flag in flags.values()))


def count_blocks(n_rows: Any, n_groups: int) -> Any:
    """The most blocks that so many rows fill."""
    return (n_rows + (BLOCK_ROWS - 1) * n_groups) // BLOCK_ROWS


def _by_blocks(
    rows: jax.Array,
    row_offsets: jax.Array,
    *scales: jax.Array,
    along_rows: bool,
    along_columns: bool,
) -> list[jax.Array]:
    n_rows: Any = rows.shape[0]
    results: list[jax.Array] = []
    if scales:
        rows = dequantize_rows(rows, scales[0], jnp.float32)
    if along_rows:
        codes, of_rows = _Format().quantize(rows)
        results += [codes, of_rows.T]
    if along_columns:
        n_blocks = count_blocks(n_rows, row_offsets.shape[0] - 1)
        row_offsets = jnp.minimum(row_offsets, jnp.uint32(n_rows))
        row = rows_of_blocks(row_offsets, n_blocks, n_rows).reshape(-1)
        integers = as_integers(rows)
        if isinstance(n_rows, int) and not n_rows:  # there is none to take
            integers = jnp.zeros((row.size, rows.shape[1]), integers.dtype)
        else:
            integers = integers.at[row].get(mode="fill", fill_value=0)
        blocks = lax.bitcast_convert_type(integers, rows.dtype)
        codes, of_columns = _Format().quantize(blocks.T)
        results += [codes, of_columns.T]
    return results


def _lower(
    ctx: mlir.LoweringRuleContext, *operands: Any, platform: str = "other", **flags: bool
) -> Any:
    types: Any = ctx.avals_in
    rows, row_offsets, *_ = types
    sizes = rows.shape[0], row_offsets.shape[0] - 1, 0, rows.shape[1]
    work = Work(Operation.QUANTIZE, *sizes, rows.dtype, _CODE, is_scaled=len(operands) > 2)
    if choose(work, platform) != Implementation.KERNEL:
        return mlir.lower_fun(_by_blocks, multiple_results=True)(ctx, *operands, **flags)
    attributes = {name: np.bool_(flag) for name, flag in flags.items()}
    return fusion_barrier(custom_call(_TARGET)(ctx, *operands, **attributes))


quantize_rows_p = make_primitive(_TARGET, cuda=functools.partial(_lower, platform="cuda"))
mlir.register_lowering(quantize_rows_p, _lower)


@quantize_rows_p.def_abstract_eval
def _result_types(
    rows: Any, row_offsets: Any, *_: Any, along_rows: bool, along_columns: bool
) -> Any:
    (n_rows, n), types = rows.shape, []
    if along_rows:
        shape = n // BlockwiseFP8.block_size, n_rows
        types += [like(rows, (n_rows, n), _CODE), like(rows, shape, np.float32)]
    if along_columns:
        n_blocks = count_blocks(n_rows, row_offsets.shape[0] - 1)
        shape = n, n_blocks * BLOCK_ROWS
        types += [like(rows, shape, _CODE), like(rows, (n_blocks, n), np.float32)]
    return types
