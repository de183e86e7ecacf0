"""Token formats against their oracle, bitwise, and the oracle against examples by hand."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_ep
import oracle_formats as oracle
from harness import QUANTIZED_FORMATS, assert_same_bits

FORMATS = {name: each() for name, each in QUANTIZED_FORMATS.items()}
NAMES = list(FORMATS)
E8M0_ONE = 127


@functools.cache
def jitted(name: str, what: str):
    return jax.jit(getattr(FORMATS[name], what))


def input_scale_of(name: str, value: float):
    return np.float32(value) if name == "nvfp4" else None


def check(name: str, tokens: np.ndarray, input_scale: float = 1.0) -> None:
    """Compares codes and scales with the oracle's."""
    wanted = oracle.quantize(name, tokens, input_scale)
    got = jitted(name, "quantize")(tokens, input_scale_of(name, input_scale))
    what = f"{name}, input_scale={input_scale}"
    assert_same_bits(np.asarray(got.codes).view(np.uint8), wanted.codes, what)
    assert_same_bits(np.asarray(got.scales), wanted.scales, f"{what}, scales")


def every_bfloat16() -> np.ndarray:
    return np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)


def with_block_maximum(name: str, maxima: np.ndarray) -> np.ndarray:
    """A block for each maximum; its other elements are fractions of it, of both signs."""
    size = oracle.BLOCK_SIZE[name]
    fractions = np.linspace(-1, 1, size - 1).astype(np.float32)
    with np.errstate(all="ignore"):
        rest = (maxima.astype(np.float32)[:, None] * fractions).astype(maxima.dtype)
    return np.concatenate([maxima[:, None], rest], axis=1)


INPUT_SCALES = [1.0, 448 * 6 / 3.5, 2.0**-100, 2.0**100, 1e-38, 3e38]


def scales_to_try(name: str) -> list[float]:
    return INPUT_SCALES if name == "nvfp4" else [1.0]


@pytest.mark.parametrize("name", NAMES)
def test_every_bfloat16_as_an_element_matches_the_oracle(name):
    """In blocks with magnitudes of all binades, and alone in a block of ones."""
    size = oracle.BLOCK_SIZE[name]
    patterns = every_bfloat16()
    ordered = patterns.reshape(-1, size)
    mixed = np.random.default_rng(0).permutation(patterns).reshape(-1, size)
    among_ones = np.ones((len(patterns), size), ml_dtypes.bfloat16)
    among_ones[:, 1] = patterns
    for input_scale in scales_to_try(name):
        for tokens in (ordered, mixed, among_ones):
            check(name, tokens, input_scale)


@pytest.mark.parametrize("name", NAMES)
def test_every_bfloat16_as_block_maximum_matches_the_oracle(name):
    for input_scale in scales_to_try(name):
        check(name, with_block_maximum(name, every_bfloat16()), input_scale)


@pytest.mark.parametrize("name", NAMES)
def test_float32_of_all_magnitudes_match_the_oracle(name):
    rng = np.random.default_rng(1)
    patterns = rng.integers(0, 1 << 32, (4096, 128), np.uint32)
    check(name, patterns.view(np.float32))
    # Blocks of one magnitude each, subnormal ones included.
    exponents = rng.integers(0, 255, (4096, 1)) << 23
    patterns = (patterns & 0x807FFFFF) | exponents.astype(np.uint32)
    for input_scale in scales_to_try(name):
        check(name, patterns.view(np.float32), input_scale)


@pytest.mark.parametrize("name", NAMES)
def test_maxima_where_the_scale_changes_match_the_oracle(name):
    """Around each power of two times 1, 1.5, 1.75, 448 and 6, and around 1e-4."""
    powers = np.ldexp(1.0, np.arange(-149, 128))
    edges = np.outer(powers, [1, 1.5, 1.75, 448 / 512, 6 / 8]).ravel()
    edges = np.concatenate([edges, [1e-4, 2.0**-9 * 6]]).astype(np.float32)
    edges = edges[edges > 0]
    patterns = edges.view(np.uint32)[:, None] + np.arange(-3, 4, dtype=np.int64)
    patterns = np.clip(patterns, 0, 0x7F7FFFFF).astype(np.uint32).ravel()
    for input_scale in scales_to_try(name):
        check(name, with_block_maximum(name, patterns.view(np.float32)), input_scale)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_nan_or_an_infinity_makes_its_block_zero_and_no_other(name, bad):
    size = oracle.BLOCK_SIZE[name]
    tokens = np.linspace(-3, 3, 4 * size).astype(np.float32).reshape(2, 2 * size)
    broken = tokens.copy()
    broken[0, 1] = bad
    expected = tokens.copy()
    expected[0, :size] = 0
    check(name, broken)
    got, wanted = (jitted(name, "quantize")(x, None) for x in (broken, expected))
    for one, other in zip(got, wanted, strict=True):
        assert_same_bits(np.asarray(one), np.asarray(other), name)
    assert not np.asarray(got.codes).view(np.uint8).reshape(2, 2, -1)[0, 0].any()


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_an_unusable_input_scale_gives_zeros(bad):
    tokens = np.linspace(-3, 3, 64).astype(np.float32).reshape(1, 64)
    check("nvfp4", tokens, bad)
    got = jitted("nvfp4", "quantize")(tokens, np.float32(bad))
    assert not np.asarray(got.scales).view(np.uint8).any()
    assert not (np.asarray(got.codes) & 0x77).any()


@pytest.mark.parametrize("name", NAMES)
def test_dequantized_numbers_match_the_oracle(name):
    rng = np.random.default_rng(2)
    tokens = rng.standard_normal((16, 256)).astype(ml_dtypes.bfloat16)
    for input_scale in (1.0, 0.37):
        wanted = oracle.quantize(name, tokens, input_scale)
        operands = jitted(name, "quantize")(tokens, input_scale_of(name, input_scale))
        got = FORMATS[name].dequantize(operands, input_scale_of(name, input_scale))
        assert_same_bits(
            np.asarray(got), oracle.dequantize(name, wanted, input_scale), f"{name}, {input_scale}"
        )


# The largest error of an element, relative to the maximum of its block.
MAX_ERROR = {"blockwise_fp8": 1 / 16, "mxfp8": 1 / 16, "mxfp4": 0.2, "nvfp4": 0.2}


@pytest.mark.parametrize("name", NAMES)
def test_dequantized_numbers_are_close_to_the_tokens(name):
    rng = np.random.default_rng(3)
    tokens = rng.standard_normal((64, 256)).astype(np.float32)
    got = FORMATS[name].dequantize(jitted(name, "quantize")(tokens, None))
    blocks = (2, 256 // oracle.BLOCK_SIZE[name], oracle.BLOCK_SIZE[name])
    error = np.abs(np.asarray(got) - tokens).reshape(-1, *blocks[1:])
    largest = np.abs(tokens).reshape(-1, *blocks[1:]).max(-1, keepdims=True)
    assert (error / largest).max() <= MAX_ERROR[name]
    assert (error / largest).max() > MAX_ERROR[name] / 8


# What adds to that error: the last place of small numbers. XLA:CPU flushes the scale 2^-127. For
# NVFP4, times the reciprocal of the input scale.
FLOOR = {"blockwise_fp8": 2.2e-10, "mxfp8": 2.64e-36, "mxfp4": 4.2e-38, "nvfp4": 6 * 2.0**-10}


def near_the_ends() -> np.ndarray:
    """Positive float32: from zero to 2^-100, and from 2^120 to the largest, also of bfloat16."""
    low = np.linspace(0, 27 << 23, 4001).astype(np.uint32).view(np.float32)
    top = np.linspace(247 << 23, 0x7F7FFFFF, 4001).astype(np.uint32).view(np.float32)
    edges = np.array([1.5, 1.625, 1.75, 1.875, 1.9375, 1.9921875, 1.99609375]) * 2.0**127
    edges = edges.astype(np.float32)
    return np.concatenate([low, top, edges, np.nextafter(edges, np.float32(0))])


@pytest.mark.parametrize("name", NAMES)
def test_finite_numbers_stay_finite_up_to_both_ends_of_the_range(name):
    """In float32 and in bfloat16, within the documented error of a block's maximum."""
    numbers = every_bfloat16().astype(np.float32)
    maxima = np.concatenate([numbers[np.isfinite(numbers)], near_the_ends()])
    tokens = with_block_maximum(name, maxima)
    bounded = np.clip(tokens, -oracle.LARGEST[name], oracle.LARGEST[name]).astype(np.float64)
    largest = np.abs(bounded).max(-1, keepdims=True)
    # Of NVFP4: the usual ones for tokens of up to 1 and of up to 2^128, and a smaller one.
    for input_scale in [448 * 6, 448 * 6 / 2.0**128, 1e-38] if name == "nvfp4" else [1.0]:
        scale = input_scale_of(name, input_scale)
        fits = largest[:, 0] <= (448 * 6 / input_scale if name == "nvfp4" else np.inf)
        allowed = MAX_ERROR[name] * largest + FLOOR[name] / input_scale
        quantized = jitted(name, "quantize")(tokens, scale)
        for dtype in (np.float32, ml_dtypes.bfloat16):
            got = np.asarray(FORMATS[name].dequantize(quantized, scale, dtype)).astype(np.float64)
            assert np.isfinite(got).all(), f"{name}, {input_scale}, {dtype}"
            assert (np.abs(got - bounded) <= allowed)[fits].all(), f"{name}, {input_scale}"


@pytest.mark.parametrize("input_scale", [1.0, 1e-38, 2.0**-140, 3e38])
def test_nvfp4_with_any_input_scale_gives_finite_numbers(input_scale):
    tokens = with_block_maximum("nvfp4", every_bfloat16())
    scale = np.float32(input_scale)
    got = FORMATS["nvfp4"].dequantize(jitted("nvfp4", "quantize")(tokens, scale), scale)
    assert np.isfinite(np.asarray(got)).all()


def test_the_largest_numbers_match_examples_by_hand():
    def largest(name, x, input_scale=1.0):
        tokens = np.full((1, oracle.BLOCK_SIZE[name]), x, np.float32)
        return float(oracle.dequantize(name, oracle.quantize(name, tokens, input_scale))[0, 0])

    assert largest("mxfp8", 3.38e38) == 240 * 2.0**120
    assert largest("mxfp8", -3.4e38) == -240 * 2.0**120
    assert largest("mxfp8", 1.75 * 2.0**127) == 448 * 2.0**119
    assert largest("mxfp4", 3.38e38) == 6 * 2.0**125
    assert largest("mxfp4", 1.5 * 2.0**127) == 6 * 2.0**125
    assert largest("blockwise_fp8", 3.4e38) == pytest.approx(1.9921875 * 2.0**127, rel=1e-6)


def test_e2m1_ties_go_to_even():
    """To the one of two neighbors whose code is even."""
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7]
    tokens = np.array([ties * 2 + [4.0] * 16], np.float32)
    tokens[0, 8:16] *= -1
    quantized = oracle.quantize("mxfp4", tokens)
    # The maximum 7 is at least 1.75 * 4, so the scale is 2^(3 - 2).
    assert quantized.scales.view(np.uint8).item() == E8M0_ONE + 1
    quantized = oracle.quantize("mxfp4", np.clip(tokens, -6, 6))
    assert quantized.scales.view(np.uint8).item() == E8M0_ONE
    values = oracle.dequantize("mxfp4", quantized)[0]
    np.testing.assert_array_equal(values[:7], [0, 1, 1, 2, 2, 4, 4])
    assert quantized.codes[0, :2].tolist() == [0x20, 0x42]  # low nibble first


def test_scales_match_examples_by_hand():
    def scale(name, amax, input_scale=1.0):
        tokens = np.full((1, oracle.BLOCK_SIZE[name]), amax, np.float32)
        return oracle.quantize(name, tokens, input_scale).scales.item()

    assert scale("blockwise_fp8", 0) == np.float32(1e-4) / np.float32(448)
    assert scale("blockwise_fp8", 896) == 2
    assert float(scale("mxfp4", 1.6)) == 0.25
    assert float(scale("mxfp8", 448)) == 1
    assert float(scale("mxfp8", 449)) == 2
    assert float(scale("mxfp8", 0)) == 2.0**-127
    assert float(scale("nvfp4", 6)) == 1
    assert float(scale("nvfp4", 6, 2.0)) == 2
    assert float(scale("nvfp4", 1e6)) == 448  # saturates
    assert float(scale("nvfp4", 6 * 2.0**-12)) == 0


def test_scales_offsets_match_an_example_by_hand():
    offsets = np.array([0, 100, 300, 400], np.uint32)
    assert oracle.scales_offsets(offsets).tolist() == [0, 1, 1]
    layout = jax_ep.MXFP8().layout
    assert layout.offsets(jnp.asarray(offsets)).tolist() == [0, 1, 1]


@pytest.mark.parametrize("layout", ["atoms", "transposed", "row_major"])
@pytest.mark.parametrize("n_scales", [4, 7])
@pytest.mark.parametrize("sizes", [[100, 200, 0, 128], [0, 0], [1], [129, 127, 300]])
def test_each_layout_places_and_reads_scales_as_the_oracle_does(layout, n_scales, sizes):
    n_rows, used = sum(sizes) + 9, sum(sizes)
    offsets = np.cumsum([0, *sizes]).astype(np.uint32)
    rng = np.random.default_rng(4)
    scales = rng.integers(0, 256, (n_rows, n_scales), np.uint8).view(oracle.E8M0)
    placer = {
        "atoms": jax_ep.MXFP8().layout,
        "transposed": jax_ep.BlockwiseFP8().layout,
        "row_major": jax_ep.MXFP8("row_major").layout,
    }[layout]
    got = np.asarray(jax.jit(placer.place)(scales, offsets))
    wanted, defined = oracle.lay_out(layout, scales[:used], offsets, n_rows)
    assert got.shape == placer.shape(n_rows, n_scales, len(sizes))
    assert_same_bits(got[defined], wanted[defined], layout)
    by_row = jax.jit(placer.by_row, static_argnums=(2, 3))
    back = by_row(wanted, offsets, n_rows, n_scales)
    assert_same_bits(np.asarray(back)[:used], scales[:used], f"{layout}, by row")


def test_tokens_have_the_documented_sizes():
    """Codes and scales of a token with H = 7168."""
    sizes = {name: each.token_bytes(7168) for name, each in FORMATS.items()}
    assert sizes == dict(blockwise_fp8=7392, mxfp8=7392, mxfp4=3808, nvfp4=4032)
    assert jax_ep.BF16().token_bytes(7168) == 14336
