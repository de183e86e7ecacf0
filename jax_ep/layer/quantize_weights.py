"""quantize_weights: experts' weights as e4m3 codes, for grouped matmuls in FP8."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.exchange import checks
from jax_ep.formats import BlockwiseFP8

SCALE_BLOCK = 128  # elements that share a scale, along each axis that has scales


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeights:
    """Weights of L experts as codes, for rows in `BlockwiseFP8`. A pytree.

    Attributes:
        codes: float8_e4m3fn `[L, N, H]`: both operands of an FP8 matmul must be contiguous along
            the axis that is summed over.
        scales: `float32[L, ceil(N / 128), H / 128]`, one per block of 128 x 128 codes.
        source: the weights that were quantized, as given, which receive the gradient; None if
            there is none.
        transposed: whether `source` is `[L, N, H]` rather than `[L, H, N]`; static.
        gradient_codes: `[L, H, N]`, the codes transposed, for gradients in FP8; None: gradients are
            in bfloat16.
    """

    codes: jax.Array
    scales: jax.Array
    source: jax.Array | None
    transposed: bool = dataclasses.field(metadata={"static": True})
    gradient_codes: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class _Blocks(BlockwiseFP8):
    """The format's arithmetic, with a scale per block of 128 x 128."""

    block_size: ClassVar[int] = SCALE_BLOCK**2


def quantize_weights(
    weights: jax.Array,
    *,
    transposed: bool = False,
    differentiable: bool = True,
    fp8_gradients: bool = False,
) -> QuantizedWeights:
    """Quantizes weights to e4m3 with one float32 scale per 128 x 128 block.

    `scale = max(amax, 1e-4) / 448`, `code = e4m3(w / scale)`, as in DeepSeek-V3 and in
    `BlockwiseFP8`; the same bits on every platform. A block with a NaN or an infinity becomes zero.

    Args:
        weights: `[L, H, N]` or, with `transposed`, `[L, N, H]`; bfloat16 or float32, H a multiple
            of 128.
        transposed: which axis of `weights` is summed over.
        differentiable: whether to keep `weights` as `source`. Pass False for inference: the codes
            need half the memory of bfloat16 or a quarter of that of float32, and no gradient
            reaches `weights`.
        fp8_gradients: whether gradients of matmuls by these weights multiply in FP8, too, rather
            than in bfloat16; N must then be a multiple of 128. The codes are kept twice. A NaN or
            an infinity in a cotangent is lost: 128 elements count as zeros.

    Raises:
        ValueError: a shape or dtype does not fit. While tracing.
    """
    name = "quantize_weights"
    flags = dict(transposed=transposed, differentiable=differentiable, fp8_gradients=fp8_gradients)
    transposed, differentiable, fp8_gradients = checks.check_flags(name, **flags)
    (weights,) = checks.as_arrays(name, weights=weights)
    letters = "L N H" if transposed else "L H N"
    checks.check_array(name, "weights", weights, (None,) * 3, letters, jnp.bfloat16, jnp.float32)
    n, k = weights.shape[1:] if transposed else weights.shape[:0:-1]
    if k % SCALE_BLOCK:
        raise ValueError(
            f"quantize_weights: H must be a multiple of {SCALE_BLOCK}, the size of a block that "
            f"shares a scale; got {k}."
        )
    if fp8_gradients and n % SCALE_BLOCK:
        raise ValueError(
            f"quantize_weights: N must be a multiple of {SCALE_BLOCK} with fp8_gradients, which "
            f"sum over it in blocks that share a scale; got {n}."
        )
    codes, scales = _quantize(lax.stop_gradient(weights))
    # Only codes are transposed: weights are larger.
    both = codes, codes.swapaxes(1, 2)
    codes, gradient_codes = both if transposed else both[::-1]
    scales = scales if transposed else scales.swapaxes(1, 2)
    source = weights if differentiable else None
    return QuantizedWeights(
        codes, scales, source, transposed, gradient_codes if fp8_gradients else None
    )


@jax.jit
def _quantize(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes `[L, n, k]`, and a scale per block, `[L, ceil(n / 128), ceil(k / 128)]`."""
    n_groups, n, k = weights.shape
    n_blocks, k_blocks = -(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK)
    if not weights.size:
        scales = jnp.zeros((n_groups, n_blocks, k_blocks), jnp.float32)
        return weights.astype(jnp.float8_e4m3fn), scales
    padded = jnp.pad(weights, ((0, 0), (0, -n % SCALE_BLOCK), (0, -k % SCALE_BLOCK)))
    blocks = padded.reshape(n_groups, n_blocks, SCALE_BLOCK, k_blocks, SCALE_BLOCK).swapaxes(2, 3)
    codes, scales = _Blocks().quantize(blocks.reshape(n_groups, n_blocks, k_blocks, -1))
    codes = codes.reshape(blocks.shape).swapaxes(2, 3).reshape(padded.shape)
    return codes[:, :n, :k], scales[..., 0]
