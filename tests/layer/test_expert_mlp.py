"""expert_mlp between dispatch and combine, against a dense layer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from harness import AXIS, QUANTIZED_FORMATS, make_mesh, on_mesh

R, E, K, T, H, F = 2, 6, 3, 24, 128, 128
FORMATS = {"plain": None} | QUANTIZED_FORMATS
# Largest error relative to the largest value: rounding to the format, a few times.
ERRORS = {
    "float32": 1e-4,
    "bfloat16": 0.02,
    "blockwise_fp8": 0.1,
    "mxfp8": 0.08,
    "mxfp4": 0.6,
    "nvfp4": 0.35,
}


@functools.cache
def arrays(dtype: str):
    """Tokens, ids, weights of choices, gate_up and down of all experts, in NumPy."""
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((R, T, E))
    scores[..., 1] = -9  # expert 1 gets nothing
    ids = np.argsort(-scores, axis=-1)[..., :K].astype(np.int32)
    ids[0, :5, 0] = -1
    tokens, weights = rng.standard_normal((R, T, H)), rng.random((R, T, K), np.float32)
    gate_up = rng.standard_normal((E, H, 2 * F)) * H**-0.5
    down = rng.standard_normal((E, F, H)) * F**-0.5
    floats = [np.asarray(x).astype(np.dtype(dtype)) for x in (tokens, gate_up, down)]
    return floats[0], ids, weights, floats[1], floats[2]


def by_rank(experts):
    """`[E, ...]` to `[R, L, ...]`."""
    return experts.reshape(R, E // R, *experts.shape[1:])


def open_group(transport, token_format, dtype="bfloat16", **options):
    config = jax_ep.EPConfig(
        n_experts=E,
        top_k=K,
        hidden_size=H,
        max_tokens_per_rank=T,
        token_format=token_format,
        combine_dtype=dtype,
        **options,
    )
    return jax_ep.ep_init(make_mesh(R), AXIS, config, transport)


def layer_of(group, prepare=lambda *weights: weights, **options):
    """The layer of one rank; `biases`: of gate_up and down, if there are any."""

    def layer(tokens, ids, weights, gate_up, down, *biases):
        rows = jax_ep.dispatch(group, tokens, ids, weights)
        given = dict(zip(("gate_up_bias", "down_bias"), biases, strict=False))
        results = jax_ep.expert_mlp(rows, *prepare(gate_up, down), **given, **options)
        return jax_ep.combine(group, results, rows)

    return layer


def dense(tokens, ids, weights, gate_up, down, gate_up_bias=0.0, down_bias=0.0, clamp=None):
    """Every token through every expert, in float32; the experts of all ranks."""
    gates = jnp.einsum("rtk,rtke->rte", weights, jax.nn.one_hot(ids, E))
    floats = [jnp.asarray(x).astype(jnp.float32) for x in (tokens, gate_up, down)]
    hidden = jnp.einsum("rth,ehf->rtef", *floats[:2]) + gate_up_bias
    gate, up = jnp.split(hidden, 2, axis=-1)
    if clamp is None:
        values = jax.nn.silu(gate) * up
    else:
        alpha, limit = clamp
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        values = (up + 1) * gate * jax.nn.sigmoid(alpha * gate)
    results = jnp.einsum("rtef,efh->rteh", values, floats[2]) + down_bias
    return jnp.einsum("rte,rteh->rth", gates, results)


def make_biases(dtype):
    """The biases of all experts, for gate_up and down."""
    rng = np.random.default_rng(1)
    return [rng.standard_normal((E, n)).astype(np.dtype(dtype)) for n in (2 * F, H)]


def value_and_gradients(layer, mesh, dtype, biases=()):
    """The layer's result, and gradients of tokens, choices' weights, gate_up, down and biases."""
    tokens, ids, *params = arrays(dtype)

    def run(ids, *params):
        out, pull = jax.vjp(lambda tokens, *params: layer(tokens, ids, *params), *params)
        return out, pull(jnp.cos(out.astype(jnp.float32)).astype(out.dtype))

    with jax.default_matmul_precision("float32"):
        weights, *experts = params
        by_ranks = map(by_rank, (*experts, *biases))
        results = on_mesh(mesh, run)(ids, tokens, weights, *by_ranks)
        return jax.tree.map(np.asarray, results)


def dense_value_and_gradients(dtype, biases=(), **options):
    """The results of the dense layer."""
    tokens, ids, *params = arrays(dtype)

    def f(tokens, *params):
        return dense(tokens, ids, *params, **options)

    with jax.default_matmul_precision("float32"):
        floats = [jnp.asarray(x, jnp.float32) for x in (tokens, *params, *biases)]
        out, pull = jax.vjp(f, *floats)
        return out, pull(jnp.cos(out))


def assert_near(got, wanted, error: float) -> None:
    def compare(got, wanted):
        got = np.asarray(got, np.float32).reshape(wanted.shape)
        np.testing.assert_allclose(got, wanted, 0, error * float(abs(wanted).max()))

    jax.tree.map(compare, got, wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_layer_and_its_gradients_match_a_dense_one(dtype, transport):
    with open_group(transport, jax_ep.Plain(dtype), dtype) as group:
        got = value_and_gradients(layer_of(group), group.mesh, dtype)
    wanted = dense_value_and_gradients(dtype)
    assert_near(got, wanted, ERRORS[dtype])
    assert_only_expert_1_has_no_gradient(got[1][2:])


def assert_only_expert_1_has_no_gradient(gradients):
    for gradient in gradients:
        experts = np.asarray(gradient).reshape(E, -1)
        assert not experts[1].any() and experts[0].any(), "expert 1 has no rows"


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1.5), ("bfloat16", 7.0)])
def test_biases_are_added_and_have_gradients(dtype, limit, transport):
    """Clamped as in GPT-OSS; with padding rows, which have biases, but no part in a gradient.

    The gradient jumps at the limit, and values that are rounded differently lie on both sides of
    it. So few are near the limit in bfloat16.
    """
    biases, options = make_biases(dtype), {"clamp": (1.702, limit)}
    with open_group(transport, jax_ep.Plain(dtype), dtype, row_alignment=16) as group:
        layer = layer_of(group, **options)
        got = value_and_gradients(layer, group.mesh, dtype, biases)
    assert_near(got, dense_value_and_gradients(dtype, biases, **options), ERRORS[dtype])
    assert_only_expert_1_has_no_gradient(got[1][2:])


@pytest.mark.thorough
def test_biases_of_fp8_matmuls(transport):
    def prepare(gate_up, down):
        return jax_ep.quantize_weights(gate_up), jax_ep.quantize_weights(down)

    biases = make_biases("bfloat16")
    with open_group(transport, jax_ep.BlockwiseFP8()) as group:
        got = value_and_gradients(layer_of(group, prepare), group.mesh, "bfloat16", biases)
    assert min(cosines(got, dense_value_and_gradients("bfloat16", biases))) > 0.99


@pytest.mark.thorough
@pytest.mark.parametrize("name", QUANTIZED_FORMATS)
def test_rows_of_every_format_are_dequantized(name, transport):
    with open_group(transport, QUANTIZED_FORMATS[name]()) as group:
        got = value_and_gradients(layer_of(group), group.mesh, "bfloat16")
    assert_near(got, dense_value_and_gradients("bfloat16"), ERRORS[name])


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["transposed", "row_major"])
def test_fp8_from_dispatch_to_combine(layout, transport):
    def prepare(gate_up, down):
        return jax_ep.quantize_weights(gate_up), jax_ep.quantize_weights(down)

    with open_group(transport, jax_ep.BlockwiseFP8(layout)) as group:
        got = value_and_gradients(layer_of(group, prepare), group.mesh, "bfloat16")
    wanted = dense_value_and_gradients("bfloat16")
    assert_near(got, wanted, 0.1)
    assert min(cosines(got, wanted)) > 0.997  # four operands with 3 bits of mantissa


def cosines(got, wanted):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a, np.float64).ravel(), np.asarray(b, np.float64).ravel()
        yield a @ b / np.sqrt(a @ a * (b @ b))


@pytest.mark.thorough
def test_weights_of_the_forms_that_models_have(transport):
    """Transposed; alternating gate and up columns with clamped activations."""
    tokens, ids, weights, gate_up, down = arrays("float32")
    clamp = (1.702, 7.0)
    with open_group(transport, jax_ep.Plain(jnp.float32), "float32") as group:

        def run(gate_up, down, **options):
            layer = on_mesh(group.mesh, layer_of(group, **options))
            with jax.default_matmul_precision("float32"):
                return np.asarray(layer(tokens, ids, weights, by_rank(gate_up), by_rank(down)))

        plain = run(gate_up, down)
        turned = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (gate_up, down)]
        assert_near(run(*turned, transposed=True), plain, 1e-5)
        interleaved = np.stack(np.split(gate_up, 2, axis=2), axis=3).reshape(gate_up.shape)
        got = run(interleaved, down, interleaved=True, clamp=clamp)
    with jax.default_matmul_precision("float32"):
        assert_near(got, dense(tokens, ids, weights, gate_up, down, clamp=clamp), 1e-4)


@pytest.mark.thorough
def test_a_checkpoint_policy_keeps_or_recomputes_the_hidden_values(transport):
    names = [jax_ep.DISPATCH_NAME, jax_ep.EXPERT_HIDDEN_NAME]
    with open_group(transport, jax_ep.BF16()) as group:
        layer = layer_of(group)
        wanted = value_and_gradients(layer, group.mesh, "bfloat16")
        n_matmuls = {}
        for n_kept in (0, 2):
            policy = jax.checkpoint_policies.save_only_these_names(*names[:n_kept])
            kept = jax.checkpoint(layer, policy=policy)
            got = value_and_gradients(kept, group.mesh, "bfloat16")
            jax.tree.map(np.testing.assert_array_equal, got, wanted)
            n_matmuls[n_kept] = count_matmuls(kept, group.mesh)
    # Two forward and four backward. The weights of the choices need the second one again.
    assert n_matmuls == {0: 6 + 2, 2: 6 + 1}


def count_matmuls(layer, mesh) -> int:
    """Grouped matmuls of the layer and its gradient, as traced."""
    tokens, ids, weights, gate_up, down = arrays("bfloat16")

    def loss(tokens, weights, gate_up, down):
        out = on_mesh(mesh, layer)(tokens, ids, weights, gate_up, down)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    gradient = jax.grad(loss, argnums=(0, 1, 2, 3))
    text = str(jax.make_jaxpr(gradient)(tokens, weights, by_rank(gate_up), by_rank(down)))
    names = "grouped_matmul", "gated_matmul", "gated_matmul_grad"
    return sum(text.count(f"jax_ep_{name}[") for name in names)


def test_a_shared_expert_has_the_first_weights(transport):
    tokens, ids, weights, gate_up, down = arrays("float32")
    options = {"fused_shared_expert": True}
    with open_group(transport, jax_ep.Plain(jnp.float32), "float32", **options) as group:
        layer = on_mesh(group.mesh, layer_of(group))
        with_shared = [
            np.concatenate([x[:, :1] * 0.5, x], axis=1) for x in (by_rank(gate_up), by_rank(down))
        ]
        with jax.default_matmul_precision("float32"):
            got = np.asarray(layer(tokens, ids, weights, *with_shared))
    with jax.default_matmul_precision("float32"):
        wanted = dense(tokens, ids, weights, gate_up, down)
        shared = [x[:, 0] for x in with_shared]
        hidden = jnp.einsum("rth,rhf->rtf", tokens, shared[0])
        gate, up = jnp.split(hidden, 2, axis=-1)
        wanted += jnp.einsum("rtf,rfh->rth", jax.nn.silu(gate) * up, shared[1])
    assert_near(got, wanted, 1e-4)


def test_weights_that_do_not_fit_are_rejected(transport):
    tokens, ids, weights, gate_up, down = arrays("bfloat16")

    def run(group, prepare=lambda *both: both, **options):
        layer = on_mesh(group.mesh, layer_of(group, prepare, **options))
        return layer(tokens, ids, weights, by_rank(gate_up), by_rank(down))

    quantize = jax_ep.quantize_weights
    with open_group(transport, jax_ep.BF16()) as group:
        with pytest.raises(TypeError, match="must both be arrays or both be QuantizedWeights"):
            run(group, lambda gate_up, down: (quantize(gate_up), down))
        with pytest.raises(ValueError, match="rows must be in BlockwiseFP8"):
            run(group, lambda *both: map(quantize, both))
    with open_group(transport, jax_ep.BlockwiseFP8()) as group:
        with pytest.raises(ValueError, match="transposed must be False"):
            run(group, lambda *both: map(quantize, both), transposed=True)
        with pytest.raises(ValueError, match="expert_mlp: gate_up must be bfloat16 or float16 or"):
            run(group, lambda gate_up, down: (gate_up.astype(int), down))
    with pytest.raises(TypeError, match="dispatched must be the result of dispatch"):
        jax_ep.expert_mlp(tokens, gate_up, down)


@pytest.mark.parametrize(
    ("prepare", "options", "message"),
    [
        (lambda a, b: (a[:2], b), {}, r"gate_up must have the shape \[L=3, H=128, 2F\]"),
        (
            lambda a, b: (a, b[:, :96]),
            {},
            "gate_up and down must be of one F: gate_up has 2F=256 .* F=128; down has F=96 rows",
        ),
        (lambda a, b: (a[:, :, :128], b), {}, "gate_up must have .* 2F=256, .* got 128, those of"),
        (lambda a, b: (a, b[0]), {}, r"down must have the shape \[L=3, F, H\]; got \(128, 128\)"),
        (lambda a, b: (None, b), {}, "gate_up must be an array; got None"),
        (lambda a, b: (a[:, :, 1:], b), {}, "gate_up must have as many gate columns as up .* 255"),
        (lambda a, b: (a.astype(jnp.float32), b), {}, "gate_up must be bfloat16; got float32"),
        (lambda a, b: (a, b.astype(jnp.float32)), {}, "down must be bfloat16; got float32"),
        (
            lambda a, b: (a.swapaxes(1, 2), b[:, :, :96]),
            {"transposed": True},
            "gate_up and down must be of one F: gate_up has 2F=256 .* F=128; down has F=96 rows",
        ),
        (
            lambda a, b: (a[:, :96], b),
            {"transposed": True},
            r"gate_up must have the shape \[L=3, 2F, H=128\]",
        ),
        (
            lambda a, b: (a, b),
            {"gate_up_bias": np.ones((3, 128), jnp.bfloat16)},
            r"gate_up_bias .* \[L=3, 2F=256\]",
        ),
        (lambda a, b: (a, b), {"down_bias": np.ones((3, 128), np.float32)}, "down_bias must be bf"),
        (
            lambda a, b: (np.ones((E, H, 2 * F), a.dtype), b),
            {},
            r"gate_up must have this rank's experts, L=3; got 6, .* jax.P\('ep'\)",
        ),
        (lambda a, b: (a, b), {"transposed": 1}, "transposed must be True or False; got 1"),
        (lambda a, b: (a, b), {"interleaved": 1}, "interleaved must be True or False; got 1"),
        (lambda a, b: (a, b), {"clamp": (1.0, -1.0)}, r"clamp must be \(alpha, limit\)"),
    ],
)
def test_errors_name_the_argument_that_does_not_fit(prepare, options, message):
    tokens, ids, weights, gate_up, down = arrays("bfloat16")
    with open_group("xla", jax_ep.BF16()) as group:
        layer = on_mesh(group.mesh, layer_of(group, prepare, **options))
        with pytest.raises(ValueError, match=f"^expert_mlp: {message}"):
            layer(tokens, ids, weights, by_rank(gate_up), by_rank(down))


def test_errors_name_the_codes_that_do_not_fit():
    tokens, ids, weights, gate_up, down = arrays("bfloat16")
    quantize = jax_ep.quantize_weights

    def run(prepare):
        layer = on_mesh(group.mesh, layer_of(group, prepare))
        return layer(tokens, ids, weights, by_rank(gate_up), by_rank(down))

    with open_group("xla", jax_ep.BlockwiseFP8()) as group:
        with pytest.raises(
            ValueError, match=r"^expert_mlp: gate_up.codes .* \[L=3, 2F, H=128\]; got \(2, "
        ):
            run(lambda a, b: (quantize(a[:2]), quantize(b)))
        with pytest.raises(
            ValueError,
            match="^expert_mlp: gate_up must have .* 2F=256, for the F=128 rows of down; got 128",
        ):
            run(lambda a, b: (quantize(a[:, :, :128]), quantize(b)))
        with pytest.raises(
            ValueError,
            match=r"^expert_mlp: gate_up.scales .* \[L=3, 2F/128=2, H/128=1\]; got \(1, 2, 1\)",
        ):
            run(
                lambda a, b: (changed(quantize(a), lambda q: {"scales": q.scales[:1]}), quantize(b))
            )
        with pytest.raises(ValueError, match=r"^expert_mlp: down.scales must be float32; got bfl"):
            run(lambda a, b: (quantize(a), changed(quantize(b), half_scales)))
        with pytest.raises(ValueError, match=r"^expert_mlp: gate_up.source .* \[L=3, 2F=256, H="):
            run(lambda a, b: (changed(quantize(a), lambda q: {"transposed": True}), quantize(b)))


def changed(quantized, fields):
    return dataclasses.replace(quantized, **fields(quantized))


def half_scales(quantized):
    return {"scales": quantized.scales.astype(jnp.bfloat16)}
