"""The primitive behind grouped matmuls: CUTLASS on GPUs, tiles on CPUs, `lax.ragged_dot` elsewhere.

It belongs to no group and works inside and outside `jax.shard_map`.
"""

import dataclasses
import enum
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir

from jax_ep.ffi import extension
from jax_ep.ffi.lowering import custom_call, fusion_barrier, like, make_primitive
from jax_ep.layer import matmul_tiles

_TARGET = "jax_ep_grouped_matmul"
_HALVES = (jnp.bfloat16, jnp.float16)
SCALE_BLOCK = 128  # elements that share a scale, along each axis that has scales
_AMPERE, _HOPPER = 8, 9  # major compute capabilities
_HOPPER_TARGET = "jax_ep_gated_scaled_matmul"  # only a build for Hopper has it
_SCALED_DTYPE = np.dtype(jnp.bfloat16)  # of the results of the kernel for codes with scales


class MatmulForm(enum.IntEnum):
    """The factors of a matmul, group by group. Values equal those in C++."""

    WEIGHTS = 0  # rows [C, k] x weights [L, k, n] -> [C, n]
    TRANSPOSED_WEIGHTS = 1  # rows [C, k] x weights [L, n, k], transposed -> [C, n]
    ROWS = 2  # rows [C, k], transposed, x rows [C, n] -> [L, k, n]


@dataclasses.dataclass(frozen=True)
class Matmul:
    """The parameters of a grouped matmul."""

    form: MatmulForm  # what is multiplied
    dtype: np.dtype  # of the result, rounded once from a sum in float32
    zeroes_unused: bool = False  # whether unused rows of the result are zero, not unspecified


def multiply_groups(
    matmul: Matmul,
    lhs: jax.Array,
    rhs: jax.Array,
    row_offsets: jax.Array,
    scales: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Binds the primitive.

    `scales`, with e4m3 operands and transposed weights: `float32[k / 128, C]` of blocks of 128
    elements of a row and `float32[L, ceil(n / 128), k / 128]` of blocks of 128 x 128 weights.
    """
    return grouped_matmul_p.bind(lhs, rhs, row_offsets, *(scales or ()), matmul=matmul)[0]


def dequantize_weights(codes: jax.Array, scales: jax.Array, dtype: Any) -> jax.Array:
    """`[L, n, k]` from codes and the scales of blocks of 128 x 128."""
    rows = jnp.repeat(scales, SCALE_BLOCK, axis=1)[:, : codes.shape[1]]
    by_element = jnp.repeat(rows, SCALE_BLOCK, axis=2)
    return (codes.astype(jnp.float32) * by_element).astype(dtype)


def dequantize_rows(codes: jax.Array, scales: jax.Array, dtype: Any) -> jax.Array:
    """`[C, k]` from codes and `[k / 128, C]` scales."""
    by_element = jnp.repeat(scales.T, SCALE_BLOCK, axis=1)
    return (codes.astype(jnp.float32) * by_element).astype(dtype)


def _lower_cuda(ctx: mlir.LoweringRuleContext, *operands: Any, matmul: Matmul) -> Any:
    if not has_kernel(ctx.avals_in, ctx.avals_out[0], matmul):
        return _lower_dense(ctx, *operands, matmul=matmul)
    return call_kernel(ctx, *operands, matmul=matmul)


def call_kernel(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    matmul: Matmul,
    aliases: dict[int, int] | None = None,
) -> Any:
    """The custom call; `aliases`: results by the operands that are the same memory."""
    call = custom_call(_TARGET, operand_output_aliases=aliases)
    product, _ = call(
        ctx.replace(avals_out=[*ctx.avals_out, workspace(*ctx.avals_in)]),
        *operands,
        form=np.int32(matmul.form),
        zeroes_unused=np.bool_(matmul.zeroes_unused),
    )
    return fusion_barrier([product])


def workspace(lhs: Any, rhs: Any, row_offsets: Any, *_: Any) -> Any:
    """The type of a call's last result, memory that it works in."""
    n_bytes = 256 * 4 * 128 + 256 * (row_offsets.shape[0] - 1) + 4096  # MatmulWorkspaceBytes in C++
    return like(lhs, (n_bytes,), np.uint8)


def has_kernel(operands: Any, result: Any, matmul: Matmul) -> bool:
    """Whether the GPUs have a kernel, for the types of operands and result."""
    lhs, n = operands[0], result.shape[-1]
    is_scaled = len(operands) > 3
    dtypes = (_SCALED_DTYPE,) if is_scaled else (lhs.dtype, np.dtype(np.float32))
    k = result.shape[1] if matmul.form == MatmulForm.ROWS else lhs.shape[1]
    if not (is_scaled or lhs.dtype in _HALVES) or matmul.dtype not in dtypes:
        return False
    if k % (SCALE_BLOCK if is_scaled else 8) or n % 8:
        return False
    if is_scaled:
        return has_hopper_kernels()
    return _is_built() and _compute_capability() >= _AMPERE


def is_hopper() -> bool:
    """Whether the GPUs are Hopper's."""
    return _compute_capability() == _HOPPER


def has_hopper_kernels() -> bool:
    """Whether the GPUs are Hopper's, and the extension has the kernels that only these run."""
    return _is_built() and is_hopper() and _is_built_for_hopper()


@functools.cache
def _is_built_for_hopper() -> bool:
    return _HOPPER_TARGET in extension.load_cuda().targets()


@functools.cache
def _is_built() -> bool:
    """Whether the extension has the kernels; if not, warns once."""
    try:
        extension.register_cuda()
        if _TARGET in extension.load_cuda().targets():
            return True
        why = (
            "the CUDA extension was built without CUTLASS. Install nvidia-cutlass where jax_ep is "
            "built, and build it again"
        )
    except ImportError as error:
        why = extension.why_missing("_ffi_cuda", error)
    warnings.warn(
        f"grouped_matmul: {why.rstrip('.')}. Meanwhile it uses jax.lax.ragged_dot, which is many "
        "times slower on GPUs.",
        stacklevel=2,
    )
    return False


@functools.cache
def _compute_capability() -> int:
    """The major one of the GPUs; Hopper's where there are none, when lowering for others."""
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return _HOPPER
    return int(device.compute_capability.split(".")[0])


def _dequantized(codes_dtype: Any, operands: Any) -> Any:
    """Operands without scales: codes become numbers of a dtype."""
    if len(operands) == 3:
        return operands
    rows, weights, row_offsets, row_scales, weight_scales = operands
    return (
        dequantize_rows(rows, row_scales, codes_dtype),
        dequantize_weights(weights, weight_scales, codes_dtype),
        row_offsets,
    )


def inside(row_offsets: jax.Array, rows: jax.Array) -> jax.Array:
    """Offsets of rows that exist, as the kernels take them."""
    return jnp.minimum(row_offsets, jnp.uint32(rows.shape[0]))


def _by_tiles(*operands: jax.Array, matmul: Matmul) -> list[jax.Array]:
    lhs, rhs, row_offsets = _dequantized(jnp.float32, operands)
    row_offsets = inside(row_offsets, lhs)
    if matmul.form == MatmulForm.ROWS:
        return [matmul_tiles.rows_by_rows(lhs, rhs, row_offsets, dtype=matmul.dtype)]
    transposed = matmul.form == MatmulForm.TRANSPOSED_WEIGHTS
    rows = matmul_tiles.rows_by_weights(
        lhs, rhs, row_offsets, transposed=transposed, dtype=matmul.dtype
    )
    return [rows]


def by_ragged_dot(*operands: jax.Array, matmul: Matmul) -> list[jax.Array]:
    """`jax.lax`'s own, which takes no account of rows that are not in use."""
    lhs, rhs, row_offsets = _dequantized(jnp.bfloat16, operands)
    row_offsets = inside(row_offsets, lhs)
    rows = jnp.arange(lhs.shape[0], dtype=jnp.uint32)
    in_use = ((rows >= row_offsets[0]) & (rows < row_offsets[-1]))[:, None]
    # Rows before the first group count as its own, and are zero.
    sizes = jnp.diff(row_offsets.astype(jnp.int32).at[0].set(0))
    lhs = jnp.where(in_use, lhs, jnp.zeros((), lhs.dtype))
    if matmul.form == MatmulForm.ROWS:
        rhs = jnp.where(in_use, rhs, jnp.zeros((), rhs.dtype))
        contracting: Any = ((0,), (0,))
        group_axes: Any = ()
    else:
        rhs_axis = 1 if matmul.form == MatmulForm.WEIGHTS else 2
        contracting, group_axes = ((1,), (rhs_axis,)), (0,)
    product = lax.ragged_dot_general(
        lhs,
        rhs,
        sizes,
        lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(contracting, ((), ())),
            lhs_ragged_dimensions=(0,),
            rhs_group_dimensions=group_axes,
        ),
        preferred_element_type=jnp.float32,
    )
    if matmul.zeroes_unused and matmul.form != MatmulForm.ROWS:
        product = jnp.where(in_use, product, 0.0)
    return [product.astype(matmul.dtype)]


_lower_dense = mlir.lower_fun(by_ragged_dot, multiple_results=True)
grouped_matmul_p = make_primitive(
    _TARGET, cpu=mlir.lower_fun(_by_tiles, multiple_results=True), cuda=_lower_cuda
)
mlir.register_lowering(grouped_matmul_p, _lower_dense)


@grouped_matmul_p.def_abstract_eval
def _result_types(lhs: Any, rhs: Any, row_offsets: Any, *_: Any, matmul: Matmul) -> Any:
    n_rows, k = lhs.shape
    n_groups = row_offsets.shape[0] - 1
    shapes = {
        MatmulForm.WEIGHTS: (n_rows, rhs.shape[-1]),
        MatmulForm.TRANSPOSED_WEIGHTS: (n_rows, rhs.shape[1]),
        MatmulForm.ROWS: (n_groups, k, rhs.shape[-1]),
    }
    return [like(lhs, shapes[matmul.form], matmul.dtype)]
