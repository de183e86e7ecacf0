"""The differentiation rules of grouped matmuls.

The gradient of each form is a grouped matmul of another form, so that derivatives of any order
exist. Matmuls of codes have first derivatives only, which pass straight through the rounding, and
may multiply codes, too.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import bitcast_convert_type

from jax_ep.exchange.checks import vary_alike
from jax_ep.exchange.rows import row_groups
from jax_ep.layer.matmul.calls import (
    Matmul,
    MatmulForm,
    Weights,
    dequantize_rows,
    dequantize_weights,
    multiply_groups,
    split_offsets,
)
from jax_ep.layer.matmul.columns import multiply_columns
from jax_ep.layer.matmul.quantize_rows import quantize_rows

_NO_GRADIENT: Any = None  # what custom_vjp expects for integers and codes
_FLIPPED = {
    MatmulForm.WEIGHTS: MatmulForm.TRANSPOSED_WEIGHTS,
    MatmulForm.TRANSPOSED_WEIGHTS: MatmulForm.WEIGHTS,
}
_MIN_COLUMNS = 8  # of an operand that the kernels take


def _factors(form: MatmulForm, rows: Any, cotangent: Any) -> tuple[Any, Any]:
    """The factors whose product in the form `ROWS` is the gradient of the weights."""
    return (rows, cotangent) if form == MatmulForm.WEIGHTS else (cotangent, rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_matmul(matmul: Matmul, *operands: Any) -> jax.Array:
    """A grouped matmul of numbers, perhaps added to an accumulator; weights may be in two parts."""
    return multiply_groups(matmul, *operands)


def weights_gradient(
    form: MatmulForm, rows: jax.Array, weights: Weights, row_offsets: jax.Array, of_product: Any
) -> Weights:
    """The gradient of the weights of a matmul in this form, in as many parts."""
    parts = []
    for offsets in split_offsets(weights, row_offsets):
        matmul = Matmul(MatmulForm.ROWS, rows.dtype)
        parts.append(grouped_matmul(matmul, *_factors(form, rows, of_product), offsets))
    return tuple(parts) if isinstance(weights, tuple) else parts[0]


def _bwd(matmul: Matmul, saved: Any, of_product: jax.Array) -> tuple[Any, ...]:
    lhs, rhs, row_offsets = saved
    cotangent = of_product.astype(lhs.dtype)

    def multiply(form: MatmulForm, a: jax.Array, b: Weights, dtype: np.dtype) -> jax.Array:
        return grouped_matmul(Matmul(form, dtype, zeroes_unused=True), a, b, row_offsets)

    if matmul.form == MatmulForm.ROWS:
        grad_lhs = multiply(MatmulForm.TRANSPOSED_WEIGHTS, rhs, cotangent, lhs.dtype)
        grad_rhs = multiply(MatmulForm.WEIGHTS, lhs, cotangent, rhs.dtype)
        of_accumulator = (of_product,) if matmul.accumulates else ()
        return grad_lhs, grad_rhs, _NO_GRADIENT, *of_accumulator
    grad_lhs = multiply(_FLIPPED[matmul.form], cotangent, rhs, lhs.dtype)
    return grad_lhs, weights_gradient(matmul.form, lhs, rhs, row_offsets, cotangent), _NO_GRADIENT


grouped_matmul.defvjp(lambda matmul, *args: (grouped_matmul(matmul, *args), args[:3]), _bwd)


@jax.custom_vjp
def add_bias(rows: jax.Array, bias: jax.Array, row_offsets: jax.Array) -> jax.Array:
    """`rows`, `[C, N]`, plus the `bias`, `[L, N]`, of each row's group.

    A grouped matmul makes the gradient of the bias: summed in float32, from the rows in use alone,
    with the same bits in every run, unlike that of a gather.
    """
    groups = row_groups(row_offsets, rows.shape[0])
    return rows + bias.at[groups].get(mode="clip")  # beyond the last group: not in use


def _add_bias_bwd(
    row_offsets: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    ones = jnp.ones((cotangent.shape[0], _MIN_COLUMNS), cotangent.dtype)
    ones, rows, row_offsets = vary_alike((), ones, cotangent, row_offsets)
    sums = grouped_matmul(Matmul(MatmulForm.ROWS, rows.dtype), ones, rows, row_offsets)
    return cotangent, sums[:, 0], _NO_GRADIENT


add_bias.defvjp(lambda *args: (add_bias(*args), args[2]), _add_bias_bwd)


class ScaledOperands(NamedTuple):
    """e4m3 codes and their scales, as `multiply_groups` takes them."""

    rows: jax.Array
    weights: jax.Array
    row_scales: jax.Array
    weight_scales: jax.Array
    gradient_weights: jax.Array | None  # the codes of weights, transposed; None: not in FP8

    @property
    def factors(self) -> tuple[jax.Array, ...]:
        """What the matmul itself multiplies, and the scales."""
        return self[:4]


class Sources(NamedTuple):
    """The numbers that codes encode, which receive the gradients; None: there is no gradient."""

    rows: jax.Array | None
    weights: jax.Array | None  # in the form that the matmul of numbers would have


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scaled_matmul(
    source: Matmul, sources: Sources, operands: ScaledOperands, row_offsets: jax.Array
) -> jax.Array:
    """A grouped matmul of codes, with straight-through gradients, in FP8 if there are codes for it.

    `source` is the matmul of the numbers that the codes encode. Only its form and the sources'
    dtypes matter here: the sources themselves are not read, so that XLA need not compute them.
    """
    matmul = Matmul(MatmulForm.TRANSPOSED_WEIGHTS, source.dtype)
    rows, weights, *scales = operands.factors
    return multiply_groups(matmul, rows, weights, row_offsets, *scales)


class _Saved(NamedTuple):
    """The residuals of the backward of `scaled_matmul`."""

    like: Sources  # empty arrays of the sources' dtypes
    source_weights: jax.Array | None
    operands: ScaledOperands  # codes as bytes, see _view_codes
    row_offsets: jax.Array


def _scaled_fwd(source: Matmul, sources: Sources, operands: Any, row_offsets: Any) -> Any:
    product = scaled_matmul(source, sources, operands, row_offsets)
    like = Sources(*(None if x is None else jnp.zeros(0, x.dtype) for x in sources))
    source_weights, kept = _read_by_gradients(sources, operands)
    return product, _Saved(like, source_weights, _view_codes(kept, jnp.uint8), row_offsets)


def _read_by_gradients(
    sources: Sources, operands: ScaledOperands
) -> tuple[jax.Array | None, ScaledOperands]:
    """The weights' numbers and the codes that the backward reads; empty or None for the others."""
    source_weights: Any = sources.weights
    kept: Any = operands
    in_fp8 = operands.gradient_weights is not None
    if source_weights is None:
        kept = kept._replace(rows=None, row_scales=None)
    if in_fp8 or source_weights is not None or sources.rows is None:
        kept = kept._replace(weights=None)
    if sources.rows is None:
        source_weights = None
        gradient_weights = kept.gradient_weights[:0] if in_fp8 else None  # says that it is in FP8
        kept = kept._replace(weight_scales=None, gradient_weights=gradient_weights)
    return None if in_fp8 else source_weights, kept


def _view_codes(operands: ScaledOperands, dtype: Any) -> ScaledOperands:
    """Codes as bytes, or back.

    JAX applies `reduce_precision` to floats that a `jax.checkpoint` policy keeps, which turns e4m3
    numbers from 256 on into NaNs.
    """

    def view(codes: Any) -> Any:
        return None if codes is None else bitcast_convert_type(codes, dtype)

    rows, weights, gradient_weights = map(
        view, (operands.rows, operands.weights, operands.gradient_weights)
    )
    return operands._replace(rows=rows, weights=weights, gradient_weights=gradient_weights)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _straight_through(source: Matmul, saved: _Saved, cotangent: jax.Array) -> Sources:
    """The gradients of the sources, from the numbers that the codes stand for."""
    like, weights, operands, row_offsets = saved
    operands = _view_codes(operands, jnp.float8_e4m3fn)
    if operands.gradient_weights is not None:
        return _in_fp8(source, like, operands, row_offsets, cotangent)
    grads = Sources(None, None)
    if like.rows is not None:
        form = source.form
        if weights is None:  # only their codes are there
            weights = dequantize_weights(operands.weights, operands.weight_scales, cotangent.dtype)
            form = MatmulForm.TRANSPOSED_WEIGHTS
        matmul = Matmul(_FLIPPED[form], like.rows.dtype, zeroes_unused=True)
        grad_rows = multiply_groups(matmul, cotangent, weights.astype(cotangent.dtype), row_offsets)
        grads = grads._replace(rows=grad_rows)
    if like.weights is not None:
        rows = dequantize_rows(operands.rows, operands.row_scales, cotangent.dtype)
        factors = _factors(source.form, rows, cotangent)
        matmul = Matmul(MatmulForm.ROWS, like.weights.dtype)
        grads = grads._replace(weights=multiply_groups(matmul, *factors, row_offsets))
    return grads


def _in_fp8(
    source: Matmul,
    like: Sources,
    operands: ScaledOperands,
    row_offsets: jax.Array,
    cotangent: jax.Array,
) -> Sources:
    """The same by matmuls in FP8, for which the cotangent is quantized."""
    grads = Sources(None, None)
    along_rows, along_columns = quantize_rows(
        *(cotangent, row_offsets),
        along_rows=like.rows is not None,
        along_columns=like.weights is not None,
    )
    if along_rows is not None and like.rows is not None:
        matmul = Matmul(MatmulForm.TRANSPOSED_WEIGHTS, cotangent.dtype, zeroes_unused=True)
        weights: Any = operands.gradient_weights
        scales = along_rows.scales, operands.weight_scales.swapaxes(1, 2)
        grad_rows = multiply_groups(matmul, along_rows.codes, weights, row_offsets, *scales)
        grads = grads._replace(rows=grad_rows.astype(like.rows.dtype))
    if along_columns is not None and like.weights is not None:
        rows = quantize_rows(operands.rows, row_offsets, operands.row_scales, along_columns=True)
        lhs, rhs = _factors(source.form, rows.along_columns, along_columns)
        grad_weights = multiply_columns(like.weights.dtype, lhs, rhs, row_offsets)
        grads = grads._replace(weights=grad_weights)
    return grads


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def add_products_of_codes(
    form: MatmulForm,
    rows: jax.Array,
    row_scales: jax.Array,
    cotangent: jax.Array,
    row_offsets: jax.Array,
    accumulator: jax.Array,
) -> jax.Array:
    """The accumulator plus the gradient of weights in FP8; of a matmul of codes in this form."""
    of_rows = quantize_rows(rows, row_offsets, row_scales, along_columns=True)
    of_product = quantize_rows(cotangent, row_offsets, along_columns=True)
    lhs, rhs = _factors(form, of_rows.along_columns, of_product.along_columns)
    return multiply_columns(accumulator.dtype, lhs, rhs, row_offsets, accumulator)


@add_products_of_codes.defjvp
def _no_derivative(form: MatmulForm, *_: Any) -> Any:
    raise NotImplementedError(
        "grouped_matmul_gradient: a sum of products of codes has no derivative. Pass numbers, such "
        "as jax_ep.dequantize() gives."
    )


@_straight_through.defjvp
def _no_second_derivative(source: Matmul, *_: Any) -> Any:
    raise NotImplementedError(
        "grouped_matmul: a matmul of codes has no second derivative. Multiply numbers: "
        "jax_ep.dequantize() gives the rows of a dispatch."
    )


scaled_matmul.defvjp(
    _scaled_fwd,
    lambda source, saved, cotangent: (
        _straight_through(source, saved, cotangent),
        _NO_GRADIENT,
        _NO_GRADIENT,
    ),
)
