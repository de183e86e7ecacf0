"""Layers in groups with copies of experts: what they compute is what they compute without."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
import routing
from harness import AXIS, assert_same_bits, float32_group, make_mesh

R, E, K, H, F, T = 4, 16, 4, 128, 128, 24
BY_RANK = jax.P(AXIS)


def open_group(transport, n_copies, **options):
    sizes = dict(n_experts=E, top_k=K, hidden_size=H, max_tokens_per_rank=T)
    return float32_group(make_mesh(R), transport, expert_copies=n_copies, **sizes | options)


def make_operands(name="zipf", seed=0, n_groups=E, biases=False):
    """Tokens, ids, weights and the experts' weights: whole numbers, whose sums are exact."""
    rng = np.random.default_rng(seed)
    shapes = [(R * T, H), (R * T, K), (n_groups, H, 2 * F), (n_groups, F, H)]
    shapes += [(n_groups, 2 * F), (n_groups, H)] if biases else []
    tokens, *others = (np.round(rng.standard_normal(shape)).astype(np.float32) for shape in shapes)
    ids = routing.make(name, seed, R, T, E, K).reshape(R * T, K)
    return tokens, ids, *others


def linear_experts(rows, gate_up, down, *biases):
    """Two matmuls with nothing in between, for exact results of whole numbers."""
    gate_up, down, *biases = jax_ep.fetch_experts(rows, (gate_up, down, *biases))
    hidden = jax_ep.grouped_matmul(rows.tokens, gate_up[..., :F], rows.row_offsets)
    results = jax_ep.grouped_matmul(hidden, down, rows.row_offsets)
    for bias in biases:
        results += bias[rows.row_expert_ids][:, :H]
    return results


def on_all_ranks(group, experts, wrap=lambda layer: layer):
    def layer(tokens, ids, weights, *of_experts):
        rows = jax_ep.dispatch(group, tokens, ids, weights)
        return jax_ep.combine(group, experts(rows, *of_experts), rows)

    def mapped(*operands):
        specs = (BY_RANK,) * len(operands)
        call = jax.shard_map(wrap(layer), mesh=group.mesh, in_specs=specs, out_specs=BY_RANK)
        return call(*operands)

    return mapped


def value_and_gradients(layer):
    """A jitted function of tokens, ids and all others."""

    def loss(floats, ids):
        tokens, *others = floats
        output = layer(tokens, ids, *others)
        return jnp.sum(output * tokens[:, ::-1]), output

    grad = jax.jit(jax.grad(loss, has_aux=True))
    return lambda tokens, ids, *others: jax.tree.leaves(grad([tokens, *others], ids))


@pytest.mark.parametrize("n_copies", [1, 8])
def test_whole_numbers_have_the_same_bits_as_without_copies(n_copies, transport):
    groups = [open_group(transport, n, recv_capacity=R * T * K) for n in (n_copies, 0)]
    run, plain = (value_and_gradients(on_all_ranks(each, linear_experts)) for each in groups)
    for name in ("zipf", "one_rank", "one_expert", "duplicates", "nothing"):
        operands = make_operands(name, biases=True)
        for i, (got, wanted) in enumerate(zip(run(*operands), plain(*operands), strict=True)):
            assert np.abs(wanted).max() < 2**24  # exact in float32, as are all partial sums
            assert np.any(wanted) or name == "nothing"
            np.testing.assert_array_equal(got, wanted, f"{name}, result {i}")


def dense_layer(tokens, ids, weights, gate_up, down):
    """In float64, every expert for every token."""
    hidden = jnp.einsum("th,ehf->etf", tokens, gate_up)
    values = jax.nn.silu(hidden[..., :F]) * hidden[..., F:]
    results = jnp.einsum("etf,efh->eth", values, down)
    chosen = ids[:, :, None] == jnp.arange(E, dtype=jnp.int32)
    return jnp.einsum("tke,tk,eth->th", chosen.astype(jnp.float64), weights, results)


def test_gradients_match_the_dense_layer(transport):
    rng = np.random.default_rng(2)
    operands = list(make_operands("one_rank"))
    for i in (0, 2, 3, 4):
        operands[i] = (rng.standard_normal(operands[i].shape) * 0.1).astype(np.float32)
    group = open_group(transport, 8)
    with jax.default_matmul_precision("highest"):  # not in TF32
        got = value_and_gradients(on_all_ranks(group, jax_ep.expert_mlp))(*operands)
    with jax.enable_x64(True):
        exact = [x.astype(np.float64) if x.dtype == np.float32 else x for x in operands]
        wanted = [np.asarray(x) for x in value_and_gradients(dense_layer)(*exact)]
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(other).max())


def test_moe_with_a_shared_expert_and_biases_fetches_by_itself(transport):
    """The shared expert is the first group, before experts and copies."""
    tokens, ids, *others = make_operands("one_rank", n_groups=E + R, biases=True)
    scaled = [x / 8 for x in others]

    def run(n_copies):
        group = open_group(transport, n_copies, fused_shared_expert=True)

        def layer(tokens, ids, weights, gate_up, down, gate_up_bias, down_bias):
            biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
            return jax_ep.moe(group, tokens, ids, weights, gate_up, down, **biases)

        specs = (BY_RANK,) * 7
        mapped = jax.shard_map(layer, mesh=group.mesh, in_specs=specs, out_specs=BY_RANK)
        return value_and_gradients(mapped)(tokens, ids, *scaled)

    for one, other in zip(run(8), run(0), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(other).max())


@pytest.mark.thorough
def test_scan_and_checkpoint_change_no_bit(transport):
    group = open_group(transport, 4)
    operands = make_operands("zipf")
    layer = on_all_ranks(group, linear_experts)
    wanted = value_and_gradients(layer)(*operands)

    def scanned(tokens, ids, *others):
        def step(total, _):
            return total + jax.checkpoint(layer)(tokens, ids, *others), None

        return jax.lax.scan(step, jnp.zeros_like(tokens), length=2)[0] / 2

    for one, other in zip(value_and_gradients(scanned)(*operands), wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def layer_in_fp8(transport, n_copies, reduce=True, **options):
    """A layer of tokens, ids and the experts' weights, which it quantizes with these options."""
    formats = {"token_format": jax_ep.BlockwiseFP8(), "combine_dtype": jnp.bfloat16}
    group = open_group(transport, n_copies, **formats)

    def layer(tokens, ids, gate_up, down):
        quantized = [jax_ep.quantize_weights(x, **options) for x in (gate_up, down)]
        rows = jax_ep.dispatch(group, tokens, ids)
        return jax_ep.combine(group, jax_ep.expert_mlp(rows, *quantized), rows, reduce=reduce)

    specs = (BY_RANK,) * 4
    return jax.shard_map(layer, mesh=group.mesh, in_specs=specs, out_specs=BY_RANK)


@pytest.mark.thorough
def test_codes_of_weights_travel_bit_by_bit(transport):
    """FP8 rows and weights, on CPUs and GPUs: a copy computes what its home would."""
    tokens, ids, _, gate_up, down = make_operands("one_rank")

    def run(n_copies):
        layer = layer_in_fp8(transport, n_copies, reduce=False, differentiable=False)
        return jax.jit(layer)(tokens, ids, gate_up / 16, down / 16)

    assert_same_bits(run(8), run(0), "rows of choices")


@pytest.mark.thorough
def test_gradients_of_copies_may_be_in_fp8(transport):
    """Only their sums are in another order."""
    tokens, ids, _, gate_up, down = make_operands("one_rank")

    def run(n_copies):
        layer = layer_in_fp8(transport, n_copies, fp8_gradients=True)

        def loss(tokens, gate_up, down):
            return jnp.sum(jnp.sin(layer(tokens, ids, gate_up, down).astype(jnp.float32)))

        return jax.jit(jax.grad(loss, (0, 1, 2)))(tokens, gate_up / 16, down / 16)

    for got, wanted in zip(run(8), run(0), strict=True):
        got, wanted = (np.asarray(x, np.float64).ravel() for x in (got, wanted))
        norms = np.linalg.norm(got) * np.linalg.norm(wanted)
        assert got @ wanted > 0.998 * norms > 0


def test_with_gradients_in_fp8_codes_travel_and_no_numbers():
    tokens, ids, _, gate_up, down = make_operands()
    layer = layer_in_fp8("xla", 2, fp8_gradients=True)
    text = str(jax.make_jaxpr(layer)(tokens, ids, gate_up, down))
    found = re.findall(r":(\w+)\[([\d,]*)\][^\n=]* = all_to_all", text)
    large = {kind for kind, shape in found if shape.endswith(("256,128", "128,128"))}
    assert large == {"u8"}, found


def test_errors_name_what_must_hold(transport):
    group = open_group(transport, 2)
    tokens, ids, weights, gate_up, down = make_operands()

    def run(experts):
        jax.eval_shape(on_all_ranks(group, experts), tokens, ids, weights, gate_up, down)

    with pytest.raises(ValueError, match=r"weights must have the shape .*L.*=?4"):
        run(lambda rows, gate_up, down: jax_ep.fetch_experts(rows, gate_up[1:]))
    with pytest.raises(ValueError, match="gate_up"):
        run(lambda rows, gate_up, down: jax_ep.expert_mlp(rows, gate_up[1:], down))
    with pytest.raises(TypeError, match="dispatched must be the result of dispatch"):
        jax_ep.fetch_experts(gate_up, gate_up)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "shape",
    [(T, H, F), pytest.param((256, 1024, 1024), marks=pytest.mark.gpu)],
    ids=["few columns", "one kernel with the activation"],
)
def test_bfloat16_experts_in_two_parts_compute_what_one_does(shape, transport):
    """The matmuls of own experts and of copies, each with the activation if a kernel has both.

    Bits are equal but for the gradients of weights, whose rows are added in tiles that depend on
    the number of groups.
    """
    n_tokens, hidden, expert_size = shape
    rng = np.random.default_rng(5)
    sizes = dict(n_experts=E, top_k=K, hidden_size=hidden, max_tokens_per_rank=n_tokens)
    group = jax_ep.ep_init(make_mesh(R), AXIS, jax_ep.EPConfig(**sizes, expert_copies=4), transport)
    ids = routing.make("zipf", 0, R, n_tokens, E, K).reshape(R * n_tokens, K)
    shapes = [(R * n_tokens, hidden), (E, hidden, 2 * expert_size), (E, expert_size, hidden)]
    shapes += [(E, 2 * expert_size), (E, hidden)]
    arrays = [(rng.standard_normal(each) * 0.1).astype(jnp.bfloat16) for each in shapes]

    def by_separate_calls(rows, *weights):
        gate_up, down, *biases = jax_ep.fetch_experts(rows, weights)
        hidden = jax_ep.grouped_matmul(rows.tokens, gate_up, rows.row_offsets)
        hidden = hidden + biases[0][rows.row_expert_ids] if biases else hidden
        results = jax_ep.grouped_matmul(
            jax_ep.fused_silu(hidden, rows.row_offsets), down, rows.row_offsets
        )
        return results + biases[1][rows.row_expert_ids] if biases else results

    def in_two_parts(rows, gate_up, down, *biases):
        named = dict(zip(("gate_up_bias", "down_bias"), biases, strict=False))
        return jax_ep.expert_mlp(rows, gate_up, down, **named)

    def loss(floats, ids, experts):
        tokens, *weights = floats
        rows = jax_ep.dispatch(group, tokens, ids)
        results = experts(rows, *weights)
        is_used = jnp.arange(len(results), dtype=jnp.uint32) < rows.row_offsets[-1]
        results = jnp.where(is_used[:, None], results, 0)
        return jnp.sum(results.astype(jnp.float32) ** 2), results

    for n_floats, call in ((5, loss), (3, jax.grad(loss, has_aux=True))):
        found = []
        for experts in (in_two_parts, by_separate_calls):
            one_rank = functools.partial(call, experts=experts)
            mapped = jax.shard_map(
                lambda *x, one_rank=one_rank: jax.tree.map(jnp.atleast_1d, one_rank(*x)),
                mesh=group.mesh,
                in_specs=BY_RANK,
                out_specs=BY_RANK,
            )
            found.append(jax.tree.leaves(jax.jit(mapped)(arrays[:n_floats], ids)))
        assert np.any(np.asarray(found[0][-1], np.float32))
        for i, (one, other) in enumerate(zip(*found, strict=True)):
            if call is loss or i == 0 or i == n_floats:
                assert_same_bits(one, other, f"{n_floats} operands, result {i}")
            else:
                atol = 1e-6 * np.abs(np.asarray(other, np.float32)).max()
                np.testing.assert_allclose(one, other, rtol=2**-7, atol=atol)
