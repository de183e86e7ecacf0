"""grouped_matmul: every group of rows times the weights of its expert, and its gradient."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep.exchange import checks
from jax_ep.formats import BlockwiseFP8
from jax_ep.formats.plain import FLOATS, as_dtype
from jax_ep.formats.scales import ROW_MAJOR
from jax_ep.layer.activation.api import QuantizedRows, check_offsets
from jax_ep.layer.matmul import rules
from jax_ep.layer.matmul.calls import PRODUCTS, Matmul, MatmulForm, Weights, flatten_weights
from jax_ep.layer.matmul.rules import ScaledOperands, Sources
from jax_ep.layer.quantize_weights import SCALE_BLOCK, QuantizedWeights


def grouped_matmul(
    rows: jax.Array | QuantizedRows,
    weights: jax.Array | QuantizedWeights,
    row_offsets: jax.Array,
    *,
    transposed: bool = False,
    dtype: jax.typing.DTypeLike | None = None,
    token_format: BlockwiseFP8 | None = None,
) -> jax.Array:
    """Multiplies row i by the weights of the group that it belongs to.

    Groups may have any number of rows, or none. Sums are in float32 and rounded once; a GPU gives
    the same bits in every run. Differentiable, any number of times, in rows and weights; the
    weights of a group without rows have the gradient zero. With codes, only the weights given to
    `quantize_weights` have a gradient, and only a first one; the tokens have one too if
    `expert_mlp` multiplies them. May be called outside `jax.shard_map`, with arrays that are not
    sharded.

    On Hopper GPUs, bfloat16, float16 and FP8 run on this package's kernels; on other GPUs from
    compute capability 8.0 on, bfloat16 and float16 do. H and N must be multiples of 8 for that.
    Other calls on GPUs, such as those of float32, use `jax.lax.ragged_dot`, which multiplies every
    row by the weights of all groups; FP8 is dequantized to bfloat16 first.

    Args:
        rows: `[C, H]`, or codes as `dispatch` and `fused_silu` give them for `BlockwiseFP8`.
        weights: `[L, H, N]`, in the dtype of `rows`; or `quantize_weights(...)` for codes.
        row_offsets: `uint32[L + 1]`, as in `Dispatched`: non-decreasing, at most C; otherwise, the
            result is unspecified. To multiply only groups i to j - 1, such as those that have an
            adapter, pass `row_offsets[i : j + 1]` and weights `[j - i, ...]`.
        transposed: whether `weights` is `[L, N, H]`. Must be False with `QuantizedWeights`, which
            have their own `transposed`.
        dtype: of the result: float32 or the dtype of `rows`, which None stands for; with codes,
            bfloat16. The gradient rounds the cotangent to the dtype of `rows`, and multiplies in
            that dtype.
        token_format: of `rows`, if they are codes; None is `BlockwiseFP8()`.

    Returns:
        `[C, N]`. Rows before `row_offsets[0]` and from `row_offsets[-1]` on are unspecified, and
        zero in gradients.

    Raises:
        TypeError: only one of `rows` and `weights` is quantized. While tracing.
        ValueError: a shape or dtype does not fit. While tracing.
    """
    if isinstance(weights, QuantizedWeights) or isinstance(rows, QuantizedRows):
        return _multiply_scaled(rows, weights, row_offsets, transposed, dtype, token_format)
    return _multiply_numbers(rows, weights, row_offsets, transposed, dtype)


def grouped_matmul_gradient(
    rows: jax.Array | QuantizedRows,
    cotangent: jax.Array,
    row_offsets: jax.Array,
    accumulator: jax.Array,
    *,
    transposed: bool = False,
    token_format: BlockwiseFP8 | None = None,
) -> jax.Array:
    """Adds the gradient of the weights of a `grouped_matmul` to an accumulator.

    For group l, whose rows are x and whose rows of the cotangent are y, the result is
    `accumulator[l] + x.T @ y`. The sum over the rows is in float32, as in `grouped_matmul`, and is
    not rounded to another dtype; one float32 addition then adds it. Groups without rows keep the
    bits of the accumulator. A GPU gives the same bits in every run. Differentiable, any number of
    times, if rows are numbers. Codes are multiplied in FP8, as with `fp8_gradients` of
    `quantize_weights`, and not differentiable. May be called outside `jax.shard_map`, with arrays
    that are not sharded.

    On GPUs from compute capability 8.0 on, kernels add bfloat16 and float16 products to the
    accumulator in place, if H and N are multiples of 8. XLA copies the accumulator before that if
    it is still needed: donate it to `jax.jit`, or carry it through `jax.lax.scan`.

    Args:
        rows: `[C, H]`, as given to `grouped_matmul`: bfloat16, float16 or float32; or codes.
        cotangent: `[C, N]`, the gradient of its result, in the dtype of `rows`; with codes,
            bfloat16, and N is a multiple of 128.
        row_offsets: `uint32[L + 1]`, as given to it. Rows of no group may hold NaN.
        accumulator: `float32[L, H, N]`.
        transposed: whether the weights and the accumulator are `[L, N, H]`; their gradient is then
            `y.T @ x`.
        token_format: of `rows`, if they are codes; None is `BlockwiseFP8()`.

    Returns:
        `float32[L, H, N]`, or `[L, N, H]`.

    Raises:
        TypeError: an argument is not an array of numbers. While tracing.
        ValueError: a shape or dtype does not fit. While tracing.
    """
    checks.check_flags("grouped_matmul_gradient", transposed=transposed)
    operands = rows, cotangent, row_offsets, accumulator
    if isinstance(rows, QuantizedRows):
        return _add_products_of_codes(*operands, transposed, token_format)
    if token_format is not None:
        raise ValueError(
            "grouped_matmul_gradient: token_format must be None unless rows are codes; got "
            f"{token_format!r}."
        )
    return _add_products(*operands, transposed)


def _add_products(
    rows: Any, cotangent: Any, row_offsets: Any, accumulator: Any, transposed: bool
) -> jax.Array:
    name = "grouped_matmul_gradient"
    rows, cotangent, row_offsets, accumulator = checks.as_arrays(
        name, rows=rows, cotangent=cotangent, row_offsets=row_offsets, accumulator=accumulator
    )
    checks.check_array(name, "rows", rows, (None, None), "C H", *FLOATS)
    checks.check_array(name, "cotangent", cotangent, (rows.shape[0], None), "C N", rows.dtype)
    check_offsets(name, row_offsets)
    lhs, rhs, letters = rows, cotangent, "L H N"
    if transposed:
        lhs, rhs, letters = cotangent, rows, "L N H"
    shape = (row_offsets.shape[0] - 1, lhs.shape[1], rhs.shape[1])
    checks.check_array(name, "accumulator", accumulator, shape, letters, jnp.float32)
    operands = checks.vary_alike((), lhs, rhs, lax.stop_gradient(row_offsets), accumulator)
    if 0 in (*lhs.shape, *shape):
        return operands[-1]
    return rules.grouped_matmul(PRODUCTS, *operands)


def _add_products_of_codes(
    rows: Any,
    cotangent: Any,
    row_offsets: Any,
    accumulator: Any,
    transposed: bool,
    token_format: Any,
) -> jax.Array:
    name = "grouped_matmul_gradient"
    token_format = BlockwiseFP8() if token_format is None else token_format
    _check_format(name, token_format)
    cotangent, row_offsets, accumulator = checks.as_arrays(
        name, cotangent=cotangent, row_offsets=row_offsets, accumulator=accumulator
    )
    _check_row_codes(name, rows, token_format)
    n_rows, hidden_size = rows.tokens.shape
    checks.check_array(name, "cotangent", cotangent, (n_rows, None), "C N", jnp.bfloat16)
    check_offsets(name, row_offsets)
    n_columns = cotangent.shape[1]
    if n_columns % SCALE_BLOCK:
        raise ValueError(
            f"{name}: N must be a multiple of {SCALE_BLOCK} with codes, since a scale covers so "
            f"many columns; got {n_columns}."
        )
    sizes, letters = (hidden_size, n_columns), "L H N"
    if transposed:
        sizes, letters = sizes[::-1], "L N H"
    shape = row_offsets.shape[0] - 1, *sizes
    checks.check_array(name, "accumulator", accumulator, shape, letters, jnp.float32)
    rows = transposed_scales(rows, token_format)
    arrays = rows.tokens, rows.scales, cotangent, lax.stop_gradient(row_offsets), accumulator
    operands = checks.vary_alike((), *arrays)
    if 0 in (n_rows, *shape):
        return operands[-1]
    return rules.add_products_of_codes(_form(transposed), *operands)


def _multiply_numbers(
    rows: Any, weights: Any, row_offsets: Any, transposed: bool, dtype: Any
) -> jax.Array:
    checks.check_flags("grouped_matmul", transposed=transposed)
    rows, weights, row_offsets = checks.as_arrays(
        "grouped_matmul", rows=rows, weights=weights, row_offsets=row_offsets
    )
    checks.check_array("grouped_matmul", "rows", rows, (None, None), "C H", *FLOATS)
    check_offsets("grouped_matmul", row_offsets)
    n_groups, hidden_size = row_offsets.shape[0] - 1, rows.shape[1]
    shape = (n_groups, None, hidden_size) if transposed else (n_groups, hidden_size, None)
    letters = "L N H" if transposed else "L H N"
    checks.check_array("grouped_matmul", "weights", weights, shape, letters, *FLOATS)
    _check_same_dtype(rows.dtype, weights.dtype)
    return multiply_arrays(rows, weights, row_offsets, transposed, _result_dtype(dtype, rows.dtype))


def _check_same_dtype(rows: np.dtype, weights: np.dtype) -> None:
    if rows == weights:
        return
    advice = ""
    if rows == jnp.bfloat16:
        advice = (
            " If rows come from fused_silu, which returns bfloat16 unless it is given a "
            f"token_format, pass jax_ep.Plain({weights.name!r}) to it."
        )
    raise ValueError(
        f"grouped_matmul: rows and weights must have the same dtype; got {rows.name} rows and "
        f"{weights.name} weights. Cast one of them with .astype().{advice}"
    )


def multiply_arrays(
    rows: jax.Array,
    weights: Weights,
    row_offsets: jax.Array,
    transposed: bool,
    dtype: np.dtype | None = None,
) -> jax.Array:
    """`grouped_matmul` of arrays that fit; weights may be in two parts."""
    matmul = Matmul(_form(transposed), dtype or rows.dtype)
    row_offsets = lax.stop_gradient(row_offsets)
    rows, weights, row_offsets = checks.vary_alike((), rows, weights, row_offsets)
    first, _ = flatten_weights(weights)
    if 0 in (*rows.shape, first.shape[0]):
        product = jnp.zeros((rows.shape[0], first.shape[1 if transposed else 2]), matmul.dtype)
        return checks.vary_alike((), product, rows, weights, row_offsets)[0]
    return rules.grouped_matmul(matmul, rows, weights, row_offsets)


def transposed_scales(rows: QuantizedRows, token_format: BlockwiseFP8) -> QuantizedRows:
    """Codes with their scales in the layout of `BlockwiseFP8()`, `[H / 128, C]`."""
    scales = rows.scales.T if token_format.layout is ROW_MAJOR else rows.scales
    return QuantizedRows(rows.tokens, scales, None)


def multiply_scaled(
    rows: QuantizedRows,
    weights: QuantizedWeights,
    row_offsets: jax.Array,
    source_rows: jax.Array | None = None,
) -> jax.Array:
    """`grouped_matmul` of codes that fit; `source_rows`, which they encode, get the gradient.

    The scales of rows are transposed.
    """
    arrays = rows.tokens, weights.codes, rows.scales, weights.scales, weights.gradient_codes
    fixed = map(lax.stop_gradient, (*arrays, row_offsets))
    operands: Any = (*fixed, source_rows, weights.source)
    *codes, row_offsets, source_rows, source_weights = checks.vary_alike((), *operands)
    source = Matmul(_form(weights.transposed), np.dtype(jnp.bfloat16))
    return rules.scaled_matmul(
        source, Sources(source_rows, source_weights), ScaledOperands(*codes), row_offsets
    )


def _multiply_scaled(
    rows: Any, weights: Any, row_offsets: Any, transposed: bool, dtype: Any, token_format: Any
) -> jax.Array:
    token_format = BlockwiseFP8() if token_format is None else token_format
    if not (isinstance(weights, QuantizedWeights) and isinstance(rows, QuantizedRows)):
        raise TypeError(
            "grouped_matmul: rows and weights must both be arrays, or QuantizedRows and "
            f"QuantizedWeights; got {type(rows).__name__} and {type(weights).__name__}. Quantize "
            "weights with quantize_weights(); jax_ep.dequantize() gives the rows of a dispatch."
        )
    _check_format("grouped_matmul", token_format)
    if transposed or (dtype is not None and as_dtype(dtype) != jnp.bfloat16):
        raise ValueError(
            "grouped_matmul: transposed must be False, and dtype bfloat16, with QuantizedWeights; "
            f"got {transposed} and {dtype}."
        )
    (row_offsets,) = checks.as_arrays("grouped_matmul", row_offsets=row_offsets)
    _check_codes(rows, weights, row_offsets, token_format)
    return multiply_scaled(transposed_scales(rows, token_format), weights, row_offsets)


def _check_format(name: str, token_format: Any) -> None:
    if not isinstance(token_format, BlockwiseFP8):
        raise ValueError(
            f"{name}: token_format must be BlockwiseFP8, for which there are kernels; got "
            f"{token_format!r}. Dequantize the rows, and multiply arrays."
        )


def _check_row_codes(name: str, rows: QuantizedRows, token_format: BlockwiseFP8) -> None:
    """Requires codes `[C, H]`, and scales that fit them."""
    checks.check_array(name, "rows.tokens", rows.tokens, (None, None), "C H", jnp.float8_e4m3fn)
    n_rows, hidden_size = rows.tokens.shape
    token_format.check_hidden_size(hidden_size)
    shape, letters = (hidden_size // SCALE_BLOCK, n_rows), "H/128 C"
    if token_format.layout is ROW_MAJOR:
        shape, letters = shape[::-1], "C H/128"
    checks.check_array(name, "rows.scales", rows.scales, shape, letters, jnp.float32)


def _check_codes(
    rows: QuantizedRows, weights: QuantizedWeights, row_offsets: Any, token_format: BlockwiseFP8
) -> None:
    check = functools.partial(checks.check_array, "grouped_matmul")

    _check_row_codes("grouped_matmul", rows, token_format)
    check_offsets("grouped_matmul", row_offsets)
    hidden_size = rows.tokens.shape[1]
    n_groups, n_scales = row_offsets.shape[0] - 1, hidden_size // SCALE_BLOCK
    shape: tuple[int | None, ...] = (n_groups, None, hidden_size)
    check("weights.codes", weights.codes, shape, "L N H", jnp.float8_e4m3fn)
    n_blocks = -(-weights.codes.shape[1] // SCALE_BLOCK)
    shape = (n_groups, n_blocks, n_scales)
    check("weights.scales", weights.scales, shape, "L N/128 H/128", jnp.float32)
    sizes = n_groups, hidden_size, weights.codes.shape[1]
    if weights.gradient_codes is not None:
        check("weights.gradient_codes", weights.gradient_codes, sizes, "L H N", jnp.float8_e4m3fn)
    if weights.source is not None:
        shape, letters = sizes, "L H N"
        if weights.transposed:
            shape, letters = (n_groups, *sizes[:0:-1]), "L N H"
        check("weights.source", weights.source, shape, letters, jnp.bfloat16, jnp.float32)


def _form(transposed: bool) -> MatmulForm:
    return MatmulForm.TRANSPOSED_WEIGHTS if transposed else MatmulForm.WEIGHTS


def _result_dtype(dtype: Any, rows_dtype: np.dtype) -> np.dtype:
    result = rows_dtype if dtype is None else as_dtype(dtype)
    if result not in (rows_dtype, np.dtype(np.float32)):
        got = repr(dtype) if result is None else result.name
        raise ValueError(
            f"grouped_matmul: dtype must be {rows_dtype.name}, as that of rows, or float32; got "
            f"{got}."
        )
    return result
