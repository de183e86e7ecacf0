"""fused_silu against the oracle, bitwise, with the arguments that match each seed kernel."""

import functools

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
import oracle_formats as oracle
import oracle_silu
from harness import AXIS, QUANTIZED_FORMATS, assert_same_bits, make_mesh
from jax_ep.ffi import extension

SIZES = [3, 0, 140, 9, 0]
F = 256
CLAMP = (1.702, 7.0)
FLOAT32 = jax_ep.Plain(jnp.float32)
KERNELS = {
    "fused_silu": (jax_ep.BF16(), {}),
    "fused_silu_fp8": (jax_ep.BlockwiseFP8(), {}),
    "fused_silu_nvfp4": (jax_ep.NVFP4(), {}),
    "fused_silu_nvfp4_interleaved": (jax_ep.NVFP4(), {"interleaved": True}),
    "fused_silu_mxfp4": (jax_ep.MXFP4("row_major"), {}),
    "fused_silu_mxfp4_clamped": (jax_ep.MXFP4("row_major"), {"clamp": CLAMP}),
    "fused_silu_mxfp8_interleaved": (jax_ep.MXFP8(), {"interleaved": True}),
}
ALL_FORMATS = [
    jax_ep.BlockwiseFP8("transposed"),
    jax_ep.BlockwiseFP8("row_major"),
    jax_ep.MXFP8("atoms"),
    jax_ep.MXFP8("row_major"),
    jax_ep.MXFP4("atoms"),
    jax_ep.MXFP4("row_major"),
    jax_ep.NVFP4("atoms"),
    jax_ep.NVFP4("row_major"),
]
VARIANTS = [{}, {"interleaved": True}, {"clamp": CLAMP}]
VARIANT_IDS = ["halves", "interleaved", "clamped"]


def make_inputs(alignment: int, dtype="bfloat16", sizes=SIZES, row_size=F):
    """Rows in groups, padded to `alignment`; NaN in unused rows."""
    sizes = [-(-size // alignment) * alignment for size in sizes]
    offsets = np.cumsum([0, *sizes]).astype(np.uint32)
    n_rows = int(offsets[-1]) + 8
    x = np.random.default_rng(0).standard_normal((n_rows, 2 * row_size), np.float32)
    x *= 4
    x[offsets[-1] :] = np.nan
    return x.astype(dtype), offsets


def run(x, offsets, token_format, **options):
    return jax.jit(lambda x, offsets: jax_ep.fused_silu(x, offsets, token_format, **options))(
        x, offsets
    )


def run_all_rows(x, **options):
    """float32 results, with all rows in one group."""
    return np.asarray(run(x, np.uint32([0, len(x)]), FLOAT32, **options))


def check_quantized(token_format, x, offsets, input_scales=None, **options) -> None:
    """Compares codes and scales of used rows with the oracle's."""
    got = run(x, offsets, token_format, input_scales=input_scales, **options)
    used, layout = int(offsets[-1]), token_format.scales_layout
    values = oracle_silu.activate(x[:used], **options)
    scales = np.ones(used, np.float32)
    if input_scales is not None:
        scales = np.repeat(input_scales, np.diff(offsets.astype(int)))
    name, row_size = token_format.name, x.shape[1] // 2
    codes = np.zeros((used, token_format.row_size(row_size)), np.uint8)
    n_scales = row_size // oracle.BLOCK_SIZE[name]
    by_row = np.zeros((used, n_scales), oracle.SCALE_DTYPE[name])
    for scale in np.unique(scales):
        rows = scales == scale
        quantized = oracle.quantize(name, values[rows], scale)
        codes[rows], by_row[rows] = quantized.codes, quantized.scales
    assert_same_bits(np.asarray(got.tokens).view(np.uint8)[:used], codes, name)
    wanted, defined = oracle.lay_out(layout, by_row, offsets, len(x))
    assert got.scales.shape == wanted.shape
    assert_same_bits(np.asarray(got.scales)[defined], wanted[defined], name)
    if layout == "atoms":
        wanted = oracle.scales_offsets(offsets)
        assert_same_bits(np.asarray(got.scales_offsets), wanted, name)


def input_scales_for(token_format, n_groups: int):
    if not token_format.takes_input_scale:
        return None
    return np.resize(np.float32([1, 2, 0.3, 40, 1e-38]), n_groups)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("options", VARIANTS, ids=VARIANT_IDS)
def test_the_activation_matches_the_oracle(options, dtype):
    x, offsets = make_inputs(1, dtype)
    got = np.asarray(run(x, offsets, FLOAT32, **options))
    used = int(offsets[-1])
    wanted = oracle_silu.activate(x[:used], **options)
    assert_same_bits(got[:used], wanted, "float32")
    for rounded in ("bfloat16", "float16"):
        got = np.asarray(run(x, offsets, jax_ep.Plain(rounded), **options))[:used]
        assert_same_bits(got, wanted.astype(got.dtype), rounded)


@pytest.mark.parametrize("row_size", [1, 7, 12, 1408])
def test_rows_of_any_length_match_the_oracle(row_size):
    x, offsets = make_inputs(1, "bfloat16", row_size=row_size)
    got, used = np.asarray(run(x, offsets, FLOAT32)), int(offsets[-1])
    assert_same_bits(got[:used], oracle_silu.activate(x[:used]), "float32")


@pytest.mark.parametrize("options", VARIANTS, ids=VARIANT_IDS)
def test_every_finite_bfloat16_gate_matches_the_oracle(options):
    gates = np.arange(1 << 16, dtype=np.uint16).view(jnp.bfloat16)
    gates = gates[np.isfinite(gates.astype(np.float32))].reshape(2, -1)
    for up in (1.0, -0.3, 1e30, 1e-30):
        ups = np.full_like(gates, up)
        pair = np.stack([gates, ups], -1 if "interleaved" in options else 1)
        x = pair.reshape(2, -1)
        wanted = oracle_silu.activate(x, **options)
        assert_same_bits(run_all_rows(x, **options), wanted, f"up = {up}")


@pytest.mark.parametrize("options", VARIANTS, ids=VARIANT_IDS)
def test_float32_of_all_magnitudes_match_the_oracle(options):
    rng = np.random.default_rng(1)
    patterns = rng.integers(0, 1 << 32, (64, 4096), np.uint32).view(np.float32)
    finite = np.where(np.isfinite(patterns), patterns, np.float32(0))
    for x in (finite, rng.uniform(-100, 100, finite.shape).astype(np.float32)):
        wanted = oracle_silu.activate(x, **options)
        assert_same_bits(run_all_rows(x, **options), wanted, "float32")


def max_error_in_ulps(gates: np.ndarray) -> float:
    """The largest error of silu, in ulps of the exact value."""
    x = np.stack([gates, np.ones_like(gates)], -1).reshape(256, -1)
    got = run_all_rows(x, interleaved=True).ravel().astype(np.float64)
    exact = gates / (1 + np.exp(-gates.astype(np.float64)))
    ulp = np.ldexp(1.0, np.maximum(np.frexp(exact)[1] - 24, -149))
    return (np.abs(got - exact) / ulp).max()


def test_silu_is_within_four_ulp():
    for gates in (np.linspace(-87, 87, 1 << 18), np.geomspace(1e-37, 87, 1 << 18)):
        assert max_error_in_ulps(gates.astype(np.float32)) < 4


@pytest.mark.slow
@pytest.mark.parametrize("sign", [0, 1 << 31])
def test_every_float32_gate_is_within_the_documented_error(sign):
    size = 1 << 22
    for first in range(0, int(np.float32(87).view(np.uint32)), size):
        patterns = np.arange(first, first + size, dtype=np.uint32) | np.uint32(sign)
        assert max_error_in_ulps(np.clip(patterns.view(np.float32), -87, 87)) < 3.91


@pytest.mark.parametrize("gate", [np.inf, -np.inf, np.nan])
def test_a_gate_that_is_not_finite_gives_the_result_of_jax(gate):
    got = run_all_rows(np.float32([[gate, 2.0]]))[0, 0]
    wanted = np.asarray(jax.nn.silu(np.float32(gate)) * 2)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", list(KERNELS)[1:])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_quantized_activations_match_the_oracle(name, dtype):
    token_format, options = KERNELS[name]
    x, offsets = make_inputs(token_format.layout.row_alignment, dtype)
    input_scales = input_scales_for(token_format, len(offsets) - 1)
    check_quantized(token_format, x, offsets, input_scales, **options)
    # Dequantized rows are defined everywhere.
    got = run(x, offsets, token_format, input_scales=input_scales, **options)
    numbers = token_format.dequantize_rows(got.tokens, got.scales, offsets, input_scales)
    used = int(offsets[-1])
    assert np.isfinite(np.asarray(numbers)[:used]).all()
    assert not np.asarray(numbers)[used:].any()


@pytest.mark.parametrize("sizes", [[0, 0], [1], [128], [0, 256, 0], [1] * 70, [300, 4]], ids=str)
@pytest.mark.parametrize("token_format", ALL_FORMATS, ids=lambda f: f"{f.name}-{f.scales_layout}")
def test_groups_of_all_sizes_match_the_oracle(token_format, sizes):
    # Full and partial tiles of scales: for 128 elements 1, 4 or 8 scales, for 384 3, 12 or 24.
    for row_size in (128, 384):
        inputs = make_inputs(token_format.layout.row_alignment, sizes=sizes, row_size=row_size)
        check_quantized(token_format, *inputs, input_scales_for(token_format, len(sizes)))


@pytest.mark.parametrize("token_format", ALL_FORMATS, ids=lambda f: f"{f.name}-{f.scales_layout}")
def test_results_match_the_oracle_if_all_rows_are_used(token_format):
    x, _ = make_inputs(1, sizes=[120])
    x = np.nan_to_num(x.astype(np.float32)).astype(x.dtype)
    check_quantized(token_format, x, np.uint32([0, 64, len(x)]))


def test_a_block_with_a_nan_or_an_infinity_is_zero():
    x, offsets = make_inputs(1)
    bad = x.copy()
    bad[0, 3], bad[2, F + 40] = np.nan, np.inf
    for token_format in ALL_FORMATS:
        check_quantized(token_format, bad, offsets)


def test_quantized_float32_of_all_magnitudes_match_the_oracle():
    patterns = np.random.default_rng(2).integers(0, 1 << 32, (64, 512), np.uint32)
    # One magnitude per row; otherwise infinities and zeros hide the rest.
    exponents = np.arange(64, dtype=np.uint32)[:, None] * 4 << 23
    x = (patterns & np.uint32(0x807FFFFF) | exponents).view(np.float32)
    for token_format in ALL_FORMATS:
        check_quantized(token_format, x, np.uint32([0, 64]))


@pytest.mark.parametrize("options", VARIANTS, ids=VARIANT_IDS)
def test_gradients_match_finite_differences(options):
    x, offsets = make_inputs(1, "float32")
    x, offsets = x[:, :32] / 4, np.uint32([0, 3, 5])

    def activate(x):
        return jax_ep.fused_silu(x, offsets, FLOAT32, **options)[:5]

    jax.test_util.check_grads(activate, (x[:8],), order=1, modes=["rev"], rtol=1e-2)

    def activate_all(x):
        return jax_ep.fused_silu(x, offsets, FLOAT32, **options)

    x[5:] = np.nan
    _, pull = jax.vjp(activate_all, jnp.asarray(x))
    (grad,) = pull(jnp.ones((len(x), 16), jnp.float32))
    assert np.abs(grad[:5]).max() > 0.1
    assert not np.asarray(grad)[5:].any()


@pytest.mark.parametrize("row_size", [F, 12])
@pytest.mark.parametrize("options", VARIANTS, ids=VARIANT_IDS)
def test_gradients_of_bfloat16_are_those_of_float32_rounded(options, row_size):
    """At the limits, too, where half of a gradient passes."""
    x, offsets = make_inputs(1, "bfloat16", row_size=row_size)
    used = int(offsets[-1])
    x[:used:7, ::3], x[1:used:7, ::5] = CLAMP[1], -CLAMP[1]
    cotangent = np.cos(np.arange(used * row_size)).reshape(used, row_size).astype(x.dtype)
    cotangent = np.pad(cotangent, ((0, len(x) - used), (0, 0)), constant_values=np.nan)

    def gradient(x, cotangent, token_format):
        _, pull = jax.vjp(lambda x: jax_ep.fused_silu(x, offsets, token_format, **options), x)
        return np.asarray(jax.jit(pull)(cotangent)[0], np.float32)

    got = gradient(x, cotangent, jax_ep.BF16())
    wanted = gradient(x.astype(np.float32), cotangent.astype(np.float32), FLOAT32)
    np.testing.assert_allclose(got, wanted, 2**-8, 1e-6)
    assert not got[used:].any()


def test_fused_silu_runs_under_vmap_and_eagerly():
    x, offsets = make_inputs(1)
    used = int(offsets[-1])
    wanted = np.asarray(run(x, offsets, None))[:used]
    both = jax.vmap(lambda x: jax_ep.fused_silu(x, offsets))(np.stack([x, 2 * x]))
    assert_same_bits(np.asarray(both)[0, :used], wanted, "vmap")
    eager = jax_ep.fused_silu(x, offsets)
    assert_same_bits(np.asarray(eager)[:used], wanted, "eager")


def test_fused_silu_runs_inside_shard_map():
    mesh = make_mesh(2)
    x, offsets = make_inputs(1)
    used, token_format = int(offsets[-1]), jax_ep.NVFP4()

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
    def per_rank(x):
        plain, pull = jax.vjp(lambda x: jax_ep.fused_silu(x[0], offsets, FLOAT32), x)
        quantized = jax_ep.fused_silu(x[0], offsets, token_format)
        return plain[None], pull(plain)[0], quantized.tokens[None]

    plain, grad, tokens = per_rank(np.stack([x, x]).astype(np.float32))
    wanted = np.asarray(run(x, offsets, token_format).tokens)
    for rank in range(2):
        values = np.asarray(plain)[rank, :used]
        assert_same_bits(values, oracle_silu.activate(x[:used]), "float32")
        assert_same_bits(np.asarray(tokens)[rank, :used], wanted[:used], "nvfp4")
        assert np.isfinite(np.asarray(grad)).all()


@pytest.mark.parametrize("options", VARIANTS, ids=VARIANT_IDS)
def test_without_the_extension_fused_silu_uses_jnp(monkeypatch, options):
    def raise_import_error():
        raise ImportError

    for register in ("register_host", "register_cuda"):
        monkeypatch.setattr(extension, register, raise_import_error)
    x, offsets = make_inputs(1)
    used = int(offsets[-1])
    got = jax.jit(lambda x: jax_ep.fused_silu(x, offsets, FLOAT32, **options))(x)
    wanted = oracle_silu.activate(x[:used], **options)
    np.testing.assert_allclose(np.asarray(got)[:used], wanted, 2e-6, 1e-30)
    # The activations differ in their last bits only, so few codes differ.
    codes = np.asarray(run(x, offsets, jax_ep.MXFP8(), **options).tokens)[:used]
    wanted = oracle.quantize("mxfp8", wanted).codes
    assert (codes.view(np.uint8) != wanted).mean() < 1e-3


@pytest.mark.parametrize("offsets", [[0, 5, 3], [0, 9], [1, 4]])
def test_invalid_offsets_are_rejected_on_cpus(offsets):
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        with pytest.raises(jax.errors.JaxRuntimeError, match="row_offsets must rise"):
            x, offsets = jnp.ones((8, 16)), jnp.asarray(offsets, jnp.uint32)
            jax.block_until_ready(run(x, offsets, FLOAT32))


@pytest.mark.parametrize(
    ("x", "options", "text"),
    [
        (np.ones((4, 3), np.float32), {}, "as many gate columns as up columns; got 3"),
        (np.ones((4, 4), np.int32), {}, "x must be bfloat16 or float16 or float32"),
        (
            np.ones((4, 64), np.float32),
            {"input_scales": np.ones(2, np.float32)},
            "input_scales is for formats that quantize",
        ),
        (
            np.ones((4, 64), np.float32),
            {"token_format": jax_ep.NVFP4(), "input_scales": np.ones(3, np.float32)},
            r"input_scales must have the shape \[L=2\]",
        ),
        (
            np.ones((4, 64), np.float32),
            {"token_format": QUANTIZED_FORMATS["blockwise_fp8"]()},
            "hidden_size must be a multiple of 128",
        ),
        (np.ones((4, 64), np.float32), {"clamp": (1.702, -7.0)}, "clamp must be"),
    ],
)
def test_invalid_arguments_are_rejected(x, options, text):
    with pytest.raises(ValueError, match=text):
        jax_ep.fused_silu(x, np.uint32([0, 2, 4]), **options)


def test_the_kernel_runs_with_jit_disabled():
    x = np.ones((3, 8), np.float32)
    offsets = np.array([0, 3], np.uint32)
    wanted = jax_ep.fused_silu(x, offsets)
    with jax.disable_jit():
        got = jax_ep.fused_silu(x, offsets)
    assert_same_bits(np.asarray(got), np.asarray(wanted), "disable_jit")


@pytest.mark.parametrize("clamp", [7.0, (1.0,), (1.0, 2.0, 3.0), (1.0, 1e39), "ab"])
def test_a_clamp_that_is_not_a_pair_of_numbers_is_rejected(clamp):
    with pytest.raises(ValueError, match="clamp must be"):
        jax_ep.fused_silu(np.ones((2, 4), np.float32), np.uint32([0, 2]), clamp=clamp)


def test_vmap_over_no_elements_gives_no_rows():
    x, offsets = np.ones((0, 3, 8), np.float32), np.array([0, 3], np.uint32)
    got = jax.vmap(jax_ep.fused_silu, in_axes=(0, None))(x, offsets)
    assert got.shape == (0, 3, 4)
