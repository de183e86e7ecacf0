"""The expected bits and layouts of quantized token formats, in plain NumPy.

Written from the formulas in docs/formats.md alone; shares no code with `jax_ep`. float32 is IEEE's:
every product and quotient is rounded once, subnormals are kept.

V elements of a token share a scale; H is a multiple of V, and a token has S = H / V scales. Codes
are bytes: one e4m3 number, or two e2m1 numbers, low nibble first.
"""

import dataclasses

import ml_dtypes
import numpy as np

F32 = np.float32
E4M3 = ml_dtypes.float8_e4m3fn
E8M0 = ml_dtypes.float8_e8m0fnu
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F32)

BLOCK_SIZE = {"blockwise_fp8": 128, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
SCALE_DTYPE = {"blockwise_fp8": F32, "mxfp8": E8M0, "mxfp4": E8M0, "nvfp4": E4M3}
# Numbers beyond these count as these.
LARGEST = {"blockwise_fp8": 1.9921875, "mxfp8": 1.875, "mxfp4": 1.5, "nvfp4": 1.625}
LARGEST = {name: F32(x * 2.0**127) for name, x in LARGEST.items()}
PACKED = ("mxfp4", "nvfp4")
# The default layout of each format; groups of rows begin at multiples of ROW_ALIGNMENT rows.
LAYOUT = {name: "atoms" for name in BLOCK_SIZE} | {"blockwise_fp8": "transposed"}
ROW_ALIGNMENT = {"transposed": 4, "row_major": 1, "atoms": 1}
ATOM_ROWS, ATOM_SCALES = 128, 4


@dataclasses.dataclass(frozen=True)
class Quantized:
    """Codes uint8[..., H] or uint8[..., H / 2], and scales [..., S]."""

    codes: np.ndarray
    scales: np.ndarray


def quantize(name: str, x: np.ndarray, input_scale: float = 1.0) -> Quantized:
    """Codes and scales of [..., H] bfloat16 or float32 numbers."""
    size = BLOCK_SIZE[name]
    n_scales = x.shape[-1] // size
    blocks = np.asarray(x).astype(F32).reshape(*x.shape[:-1], n_scales, size)
    is_dead = ~np.isfinite(blocks).all(-1)
    blocks = np.where(is_dead[..., None], F32(0), blocks)
    blocks = np.clip(blocks, -LARGEST[name], LARGEST[name])
    amax = np.abs(blocks).max(-1)
    with np.errstate(all="ignore"):
        y, scales = _SCALED[name](blocks, amax, F32(input_scale))
    codes = _e2m1(y) if name in PACKED else _e4m3(y)
    codes = codes.reshape(x.shape)
    if name in PACKED:
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    return Quantized(codes, scales)


def _blockwise_fp8(x, amax, _):
    """Scale = max(amax, 1e-4) / 448; y = x / scale."""
    scale = np.maximum(amax, F32(1e-4)) / F32(448)
    return x / scale[..., None], scale


def _mxfp8(x, amax, _):
    """Scale = amax * (1 / 448) rounded up to a power of two; y = x * (1 / scale)."""
    raw = amax * (F32(1) / F32(448))
    exponent = np.full(raw.shape, -127)
    for e in range(-127, 128):
        exponent = np.where(raw > np.ldexp(F32(1), e), e + 1, exponent)
    return _times_power_of_two(x, exponent, amax), _e8m0(exponent)


def _mxfp4(x, amax, _):
    """Even mode: the exponent of amax + a quarter of its binade, minus 2."""
    bits = amax.view(np.uint32).astype(np.int64) + (1 << 21)
    byte = np.clip((bits >> 23) - 2, 0, 254)
    return _times_power_of_two(x, byte - 127, amax), _e8m0(byte - 127)


def _nvfp4(x, amax, s_in):
    """Scale = e4m3(s_in * (amax * (1 / 6))); y = x * (1 / (scale * (1 / s_in)))."""
    raw = s_in * (amax * (F32(1) / F32(6)))
    usable = np.isfinite(s_in) and s_in > 0
    scale = np.clip(raw if usable else F32(0) * amax, 0, F32(448)).astype(E4M3)
    multiplier = F32(1) / (scale.astype(F32) * (F32(1) / s_in))
    works = usable & np.isfinite(multiplier) & (scale.astype(F32) > 0)
    multiplier = np.where(works, multiplier, F32(0))
    y = x * multiplier[..., None]
    return y, scale


_SCALED = {"blockwise_fp8": _blockwise_fp8, "mxfp8": _mxfp8, "mxfp4": _mxfp4, "nvfp4": _nvfp4}


def _times_power_of_two(x, exponent, amax):
    multiplier = np.ldexp(F32(1), -exponent).astype(F32)
    return x * np.where(amax > 0, multiplier, F32(0))[..., None]


def _e8m0(exponent) -> np.ndarray:
    return (exponent + 127).astype(np.uint8).view(E8M0)


def _e4m3(y) -> np.ndarray:
    """Nearest, ties to even, at most 448."""
    return np.clip(y, F32(-448), F32(448)).astype(E4M3).view(np.uint8)


def _e2m1(y) -> np.ndarray:
    """Nearest, ties to the even code, at most 6: 0, .5, 1, 1.5, 2, 3, 4, 6."""
    size = np.abs(y)
    code = (size > 0.25).astype(np.uint8)
    code += size >= 0.75
    code += size > 1.25
    code += size >= 1.75
    code += size > 2.5
    code += size >= 3.5
    code += size > 5
    return code | np.where(np.signbit(y), 8, 0).astype(np.uint8)


def dequantize(name: str, quantized: Quantized, input_scale: float = 1.0):
    """float32[..., H], the numbers that codes and scales stand for."""
    codes = quantized.codes
    if name in PACKED:
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
        values = E2M1_VALUES[codes & 7] * np.where(codes & 8, F32(-1), F32(1))
    else:
        values = codes.view(E4M3).astype(F32)
    scales = quantized.scales.astype(F32)
    if name == "nvfp4":
        with np.errstate(all="ignore"):
            inverse = F32(1) / F32(input_scale)
        scales = scales * (inverse if np.isfinite(inverse) else F32(0))
    return values * np.repeat(scales, BLOCK_SIZE[name], axis=-1)


def silu_times_up(x, interleaved=False, clamp=None) -> np.ndarray:
    """float64[C, F] of [C, 2 F]: silu(gate) * up, or its clamped variant."""
    x = x.astype(np.float64)
    half = x.shape[1] // 2
    gate, up = (x[:, 0::2], x[:, 1::2]) if interleaved else (x[:, :half], x[:, half:])
    if clamp is None:
        return gate / (1 + np.exp(-gate)) * up
    alpha, limit = clamp
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return (up + 1) * gate / (1 + np.exp(-alpha * gate))


def scales_offsets(row_offsets: np.ndarray) -> np.ndarray:
    """uint32[L]: the block of a group's first row, minus row_offsets[i] // 128."""
    sizes = np.diff(row_offsets.astype(np.int64))
    blocks = np.cumsum(-(-sizes // ATOM_ROWS))
    starts = np.concatenate([[0], blocks])[: len(sizes)]
    return (starts - row_offsets[:-1] // ATOM_ROWS).astype(np.uint32)


def n_blocks(n_rows: int, n_groups: int) -> int:
    """Blocks of 128 rows in an output of C rows."""
    return -(-(n_rows + n_groups * ATOM_ROWS) // ATOM_ROWS)


def lay_out(layout: str, scales, row_offsets, n_rows: int):
    """(the array for the scales [n, S] of the used rows, which of its elements are defined)."""
    if layout == "atoms":
        return _lay_out_atoms(scales, row_offsets, n_rows)
    used, n_scales = scales.shape
    array = np.zeros((n_rows, n_scales), scales.dtype)
    array[:used] = scales
    is_defined = np.zeros((n_rows, n_scales), bool)
    is_defined[:used] = True
    return (array.T, is_defined.T) if layout == "transposed" else (array, is_defined)


def _lay_out_atoms(scales, row_offsets, n_rows: int):
    n_scales = scales.shape[1]
    sizes = np.diff(row_offsets.astype(np.int64))
    shape = (n_blocks(n_rows, len(sizes)), -(-n_scales // ATOM_SCALES), 32, 4, 4)
    array, is_defined = np.zeros(shape, scales.dtype), np.zeros(shape, bool)
    block = 0
    for first, size in zip(row_offsets[:-1].astype(int), sizes, strict=True):
        row, c = np.arange(size)[:, None], np.arange(n_scales)
        at, r = block + row // ATOM_ROWS, row % ATOM_ROWS
        array[at, c // 4, r % 32, r // 32, c % 4] = scales[first : first + size]
        last = block - (-size // ATOM_ROWS)
        is_defined[block:last] = True
        block = last
    return array, is_defined
