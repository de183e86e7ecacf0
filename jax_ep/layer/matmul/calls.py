"""The primitive behind grouped matmuls: kernels on GPUs, tiles on CPUs, or `lax.ragged_dot`.

It belongs to no group and works inside and outside `jax.shard_map`.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_ep.ffi.lowering import custom_call, fusion_barrier, like, make_primitive
from jax_ep.layer.matmul import tiles
from jax_ep.layer.matmul.choose import Implementation, Operation, Work, choose
from jax_ep.layer.quantize_weights import SCALE_BLOCK

_TARGET = "jax_ep_grouped_matmul"
_KEPT = 3  # the operand that the result is added to, or whose other rows it keeps


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
    accumulates: bool = False  # whether the products, in the form ROWS, are added to an operand
    continues: bool = False  # whether the result has an operand's rows of other groups


# The weights of all groups, or those of the first ones and those of the others.
Weights = jax.Array | tuple[jax.Array, ...]
PRODUCTS = Matmul(MatmulForm.ROWS, np.dtype(np.float32), accumulates=True)


def multiply_groups(
    matmul: Matmul, lhs: jax.Array, rhs: Weights, row_offsets: jax.Array, *others: jax.Array
) -> jax.Array:
    """Binds the primitive for the factors and `row_offsets`; twice, if weights are in two parts.

    With codes and transposed weights, scales follow: `float32[k / 128, C]` of blocks of 128
    elements of a row and `float32[L, ceil(n / 128), k / 128]` of blocks of 128 x 128 weights.

    If the matmul accumulates, `float32[L, k, n]` follows, to which each group's sum over its rows
    is added in one float32 addition; none for groups without rows. On GPUs, this is in place.
    """
    if not isinstance(rhs, tuple):
        return grouped_matmul_p.bind(lhs, rhs, row_offsets, *others, matmul=matmul)[0]
    of_first, of_others = split_offsets(rhs, row_offsets)
    product = multiply_groups(matmul, lhs, rhs[0], of_first)
    matmul = dataclasses.replace(matmul, zeroes_unused=False, continues=True)
    return multiply_groups(matmul, lhs, rhs[1], of_others, product)


def split_offsets(weights: Weights, row_offsets: jax.Array) -> tuple[jax.Array, ...]:
    """The `row_offsets` of each part of the weights."""
    if not isinstance(weights, tuple):
        return (row_offsets,)
    n = weights[0].shape[0]
    return row_offsets[: n + 1], row_offsets[n:]


def flatten_weights(weights: Weights) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The first part of weights, and the other one, if there is one."""
    return (weights[0], weights[1:]) if isinstance(weights, tuple) else (weights, ())


def dequantize_weights(codes: jax.Array, scales: jax.Array, dtype: Any) -> jax.Array:
    """`[L, n, k]` from codes and the scales of blocks of 128 x 128."""
    rows = jnp.repeat(scales, SCALE_BLOCK, axis=1)[:, : codes.shape[1]]
    by_element = jnp.repeat(rows, SCALE_BLOCK, axis=2)
    return (codes.astype(jnp.float32) * by_element).astype(dtype)


def dequantize_rows(codes: jax.Array, scales: jax.Array, dtype: Any) -> jax.Array:
    """`[C, k]` from codes and `[k / 128, C]` scales."""
    by_element = jnp.repeat(scales.T, SCALE_BLOCK, axis=1)
    return (codes.astype(jnp.float32) * by_element).astype(dtype)


def work_of(
    matmul: Matmul, operands: Any, operation: Operation = Operation.MULTIPLY, **options: Any
) -> Work:
    """What is to be chosen for, from the types of a matmul's operands."""
    lhs, rhs, row_offsets, *_ = operands
    n = rhs.shape[1] if matmul.form == MatmulForm.TRANSPOSED_WEIGHTS else rhs.shape[-1]
    sizes = lhs.shape[0], row_offsets.shape[0] - 1, lhs.shape[1], n
    return Work(operation, *sizes, lhs.dtype, matmul.dtype, **options)


def call_kernel(
    ctx: mlir.LoweringRuleContext,
    target: str,
    *operands: Any,
    n_groups: int,
    aliases: dict[int, int] | None = None,
    **attributes: Any,
) -> Any:
    """A custom call whose last result, which is not returned, is memory that it works in.

    `aliases`: results by the operands that are the same memory.
    """
    n_bytes = 256 * 4 * 128 + 256 * n_groups + 4096  # MatmulWorkspaceBytes in C++
    workspace = like(ctx.avals_in[0], (n_bytes,), np.uint8)
    call = custom_call(target, operand_output_aliases=aliases)
    inner = ctx.replace(avals_out=[*ctx.avals_out, workspace])
    *results, _ = call(inner, *operands, **attributes)
    return fusion_barrier(results)


def gated_primitive(
    target: str,
    describe: Callable[..., Work],
    attributes: Callable[..., dict[str, Any]],
    by_separate_calls: Callable[..., list[jax.Array]],
    offsets_at: int,
) -> Primitive:
    """The primitive of a matmul and what follows it: one kernel, or separate calls.

    `describe(operands, **parameters)` is what the choice depends on, from their types;
    `attributes(**parameters)`, what the handler of `target` reads. The second operand is the
    weights; `row_offsets` is at `offsets_at`, before what else there is of each group. Weights of
    other groups may follow: then a second call of the kernel adds their rows to the results.
    """
    lower_separately = mlir.lower_fun(by_separate_calls, multiple_results=True)

    def lower_cuda(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        work = describe(ctx.avals_in, **params)
        if choose(work, "cuda") != Implementation.KERNEL:
            return lower_separately(ctx, *operands, **params)
        given = attributes(**params)
        if has_two_parts(ctx.avals_in[1], ctx.avals_in[offsets_at]):
            return _call_twice(ctx, target, offsets_at, operands, given)
        return call_kernel(ctx, target, *operands, n_groups=work.n_groups, **given)

    primitive = make_primitive(target, cuda=lower_cuda)
    mlir.register_lowering(primitive, lower_separately)
    return primitive


def has_two_parts(weights: Any, row_offsets: Any) -> bool:
    """Whether these are the weights of the first groups only."""
    return weights.shape[0] < row_offsets.shape[0] - 1


def _call_twice(
    ctx: mlir.LoweringRuleContext,
    target: str,
    offsets_at: int,
    operands: Sequence[Any],
    attributes: dict[str, Any],
) -> Any:
    """A kernel's calls for the first groups and for the others, with the results of both."""
    split = functools.partial(_split_groups, offsets_at)
    shapes = jax.eval_shape(split, *ctx.avals_in)
    types = [like(ctx.avals_in[0], x.shape, x.dtype) for x in shapes]
    lower = mlir.lower_fun(split, multiple_results=True)
    values = list(lower(ctx.replace(avals_out=types), *operands))
    n, n_first = len(types) // 2, types[1].shape[0]
    inner = ctx.replace(avals_in=types[:n])
    results = call_kernel(inner, target, *values[:n], n_groups=n_first, **attributes)
    inner = ctx.replace(avals_in=[*types[n:], *ctx.avals_out])
    options = dict(n_groups=types[n + 1].shape[0], aliases={n + i: i for i in range(len(results))})
    return call_kernel(inner, target, *values[n:], *results, **options, **attributes)


def _split_groups(offsets_at: int, *operands: jax.Array) -> list[jax.Array]:
    """The operands of the first groups, then those of the others."""
    *first, weights = operands
    n = first[1].shape[0]
    others = [*first]
    others[1] = weights
    first[offsets_at], others[offsets_at] = first[offsets_at][: n + 1], first[offsets_at][n:]
    for i in range(offsets_at + 1, len(first)):
        first[i], others[i] = first[i][:n], first[i][n:]
    return [*first, *others]


def _lower(
    ctx: mlir.LoweringRuleContext, *operands: Any, matmul: Matmul, platform: str = "other"
) -> Any:
    work = work_of(matmul, ctx.avals_in, is_scaled=len(operands) > _KEPT + 1)
    implementation = choose(work, platform)
    if implementation != Implementation.KERNEL:
        return _BY_JAX[implementation](ctx, *operands, matmul=matmul)
    return call_kernel(
        ctx,
        _TARGET,
        *operands,
        n_groups=work.n_groups,
        aliases={_KEPT: 0} if matmul.accumulates or matmul.continues else None,
        form=np.int32(matmul.form),
        zeroes_unused=np.bool_(matmul.zeroes_unused),
    )


def _numbers(dtype: Any, operands: Any) -> Any:
    """Rows, the other factor and `row_offsets`, with codes as numbers of a dtype; the rest."""
    lhs, rhs, row_offsets, *rest = operands
    if len(rest) == 2:
        lhs, rhs = dequantize_rows(lhs, rest[0], dtype), dequantize_weights(rhs, rest[1], dtype)
    # Offsets of rows that exist, as the kernels take them.
    row_offsets = jnp.minimum(row_offsets, jnp.uint32(lhs.shape[0]))
    return lhs, rhs, row_offsets, rest


def _by_tiles(*operands: jax.Array, matmul: Matmul) -> list[jax.Array]:
    lhs, rhs, row_offsets, rest = _numbers(jnp.float32, operands)
    if matmul.form == MatmulForm.ROWS:
        accumulator = rest[0] if matmul.accumulates else None
        return [
            tiles.rows_by_rows(lhs, rhs, row_offsets, dtype=matmul.dtype, accumulator=accumulator)
        ]
    transposed = matmul.form == MatmulForm.TRANSPOSED_WEIGHTS
    kept = rest[0] if matmul.continues else None
    return [
        tiles.rows_by_weights(
            lhs, rhs, row_offsets, transposed=transposed, dtype=matmul.dtype, kept=kept
        )
    ]


def by_ragged_dot(*operands: jax.Array, matmul: Matmul) -> list[jax.Array]:
    """`jax.lax`'s own, which takes no account of rows that are not in use."""
    lhs, rhs, row_offsets, rest = _numbers(jnp.bfloat16, operands)
    rows = jnp.arange(lhs.shape[0], dtype=jnp.uint32)
    in_use = ((rows >= row_offsets[0]) & (rows < row_offsets[-1]))[:, None]
    # Rows before the first group count as its own, and are zero.
    sizes = jnp.diff(row_offsets.astype(jnp.int32).at[0].set(0))
    lhs = jnp.where(in_use, lhs, jnp.zeros((), lhs.dtype))
    if matmul.continues:  # weights of groups without rows may be NaN, which would be multiplied
        has_rows = row_offsets[1:] > row_offsets[:-1]
        rhs = jnp.where(has_rows[:, None, None], rhs, jnp.zeros((), rhs.dtype))
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
    if matmul.accumulates:
        has_rows = (row_offsets[1:] > row_offsets[:-1])[:, None, None]
        return [jnp.where(has_rows, rest[0] + product, rest[0])]
    product = product.astype(matmul.dtype)
    return [jnp.where(in_use, product, rest[0]) if matmul.continues else product]


_BY_JAX = {
    Implementation.TILES: mlir.lower_fun(_by_tiles, multiple_results=True),
    Implementation.RAGGED_DOT: mlir.lower_fun(by_ragged_dot, multiple_results=True),
}
grouped_matmul_p = make_primitive(
    _TARGET,
    cpu=functools.partial(_lower, platform="cpu"),
    cuda=functools.partial(_lower, platform="cuda"),
)
mlir.register_lowering(grouped_matmul_p, _lower)


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
