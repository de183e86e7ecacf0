"""fused_silu: the seed's kernels, each as a set of arguments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest

import jax_ep
import oracle_formats as oracle
from harness import QUANTISED, assert_same_bits

SIZES = [3, 0, 140, 9]
F = 256
CLAMP = (1.702, 7.0)
KERNELS = {
    "fused_silu": (jax_ep.BF16(), {}),
    "fused_silu_fp8": (jax_ep.BlockwiseFP8(), {}),
    "fused_silu_nvfp4": (jax_ep.NVFP4(), {}),
    "fused_silu_nvfp4_interleaved": (jax_ep.NVFP4(), {"interleaved": True}),
    "fused_silu_mxfp4": (jax_ep.MXFP4("row_major"), {}),
    "fused_silu_mxfp4_clamped": (jax_ep.MXFP4("row_major"), {"clamp": CLAMP}),
    "fused_silu_mxfp8_interleaved": (jax_ep.MXFP8(), {"interleaved": True}),
}


def make_inputs(alignment: int, dtype="bfloat16"):
    """Rows in groups, padded as the format wants, and NaN in rows not in use."""
    sizes = [-(-size // alignment) * alignment for size in SIZES]
    offsets = np.cumsum([0, *sizes]).astype(np.uint32)
    n_rows = int(offsets[-1]) + 8
    x = np.random.default_rng(0).standard_normal((n_rows, 2 * F), np.float32) * 4
    x[offsets[-1] :] = np.nan
    return x.astype(dtype), offsets


def run(x, offsets, token_format, **options):
    return jax.jit(
        lambda x, offsets: jax_ep.fused_silu(x, offsets, token_format, **options)
    )(x, offsets)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", KERNELS)
def test_the_activation_is_the_oracles_within_a_few_ulp(name, dtype):
    token_format, options = KERNELS[name]
    x, offsets = make_inputs(token_format.layout.row_alignment, dtype)
    got = np.asarray(run(x, offsets, jax_ep.Plain(jnp.float32), **options))
    used = int(offsets[-1])
    wanted = oracle.silu_times_up(x[:used], **options)
    np.testing.assert_allclose(got[:used], wanted, 2e-6, 1e-35)
    assert not got[used:].any()


@pytest.mark.parametrize("name", list(KERNELS)[1:])
def test_float32_activations_are_quantised_to_the_oracles_bits(name):
    token_format, options = KERNELS[name]
    if name.startswith("fused_silu_nvfp4"):
        options = options | {"input_scales": np.float32([1, 2, 0.3, 40])}
    x, offsets = make_inputs(token_format.layout.row_alignment)
    plain = {key: options[key] for key in options if key != "input_scales"}
    values = np.asarray(run(x, offsets, jax_ep.Plain(jnp.float32), **plain))
    got = run(x, offsets, token_format, **options)
    used, layout = int(offsets[-1]), token_format.scales_layout
    scales = np.ones(used, np.float32)
    if "input_scales" in options:
        scales = np.repeat(options["input_scales"], np.diff(offsets.astype(int)))
    rows = [
        oracle.quantize(token_format.name, row[None], scale)
        for row, scale in zip(values[:used], scales, strict=True)
    ]
    codes = np.concatenate([row.codes for row in rows])
    assert_same_bits(np.asarray(got.tokens).view(np.uint8)[:used], codes, name)
    by_row = np.concatenate([row.scales for row in rows])
    wanted, defined = oracle.lay_out(layout, by_row, offsets, len(x))
    assert got.scales.shape == wanted.shape
    assert_same_bits(np.asarray(got.scales)[defined], wanted[defined], name)
    if layout == "atoms":
        wanted = oracle.scales_offsets(offsets)
        assert_same_bits(np.asarray(got.scales_offsets), wanted, name)
    numbers = token_format.dequantize_rows(
        got.tokens, got.scales, offsets, options.get("input_scales")
    )
    wanted = [
        oracle.dequantize(token_format.name, row, scale)
        for row, scale in zip(rows, scales, strict=True)
    ]
    assert_same_bits(np.asarray(numbers)[:used], np.concatenate(wanted), name)
    assert not np.asarray(numbers)[used:].any()


def test_bfloat16_is_rounded_once():
    x, offsets = make_inputs(1)
    values = np.asarray(run(x, offsets, jax_ep.Plain(jnp.float32)))
    got = np.asarray(run(x, offsets, None))
    assert_same_bits(got, values.astype(got.dtype), "bfloat16")


@pytest.mark.parametrize("options", [{}, {"interleaved": True}, {"clamp": CLAMP}])
def test_gradients_are_those_of_finite_differences(options):
    x, offsets = make_inputs(1, "float32")
    x, offsets = x[:, :32] / 4, np.uint32([0, 3, 5])

    def activate(x):
        return jax_ep.fused_silu(x, offsets, jax_ep.Plain(jnp.float32), **options)

    jax.test_util.check_grads(activate, (x[:8],), order=1, modes=["rev"], rtol=1e-2)
    _, pull = jax.vjp(activate, jnp.asarray(x))
    (grad,) = pull(jnp.ones((len(x), 16), jnp.float32))
    assert np.abs(grad[:5]).max() > 0.1
    assert not np.asarray(grad)[5:].any()


@pytest.mark.parametrize(
    ("x", "options", "text"),
    [
        (np.ones((4, 3), np.float32), {}, "as many columns of gate as of up; got 3"),
        (np.ones((4, 4), np.int32), {}, "x must be bfloat16 or float16 or float32"),
        (
            np.ones((4, 64), np.float32),
            {"input_scales": np.ones(2, np.float32)},
            "input_scales are for formats that quantise",
        ),
        (
            np.ones((4, 64), np.float32),
            {"token_format": jax_ep.NVFP4(), "input_scales": np.ones(3, np.float32)},
            r"input_scales must have the shape \[L=2\]",
        ),
        (
            np.ones((4, 64), np.float32),
            {"token_format": QUANTISED["blockwise_fp8"]()},
            "hidden_size must be a multiple of 128",
        ),
    ],
)
def test_wrong_arguments_are_refused(x, options, text):
    with pytest.raises(ValueError, match=text):
        jax_ep.fused_silu(x, np.uint32([0, 2, 4]), **options)
