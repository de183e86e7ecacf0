"""Tokens that the caller has quantized: the same rows as if dispatch had done it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jax_ep
import suite
from harness import (
    assert_same_bits,
    assert_trees_equal,
    each_node_by_itself,
    group_of,
    make_mesh,
    on_mesh,
    params,
    put,
    shards,
    skip_if_xla_crashes,
    skip_rows_of_no_vectors,
)

CASES = [
    *(case.replace(weights="row") for case in cases.QUANTIZED_SMALL.values()),
    *cases.QUANTIZED_EDGE,
    *cases.FLAGS_QUANTIZED,
    cases.QUANTIZED_SMALL["mxfp8"].replace(row_alignment=32),
    cases.QUANTIZED_SMALL["blockwise_fp8"].replace(n_nodes=2),
]
MXFP8 = cases.QUANTIZED_SMALL["mxfp8"]


def quantize(group, tokens, scale):
    return group.config.token_format.quantize(tokens, scale)


def check_fields(case, transport, is_async=False, **sizes) -> None:
    """Compares every field with the oracle, in bits."""
    skip_if_xla_crashes(case)
    skip_rows_of_no_vectors(case, transport)
    group = group_of(case, transport, make_mesh(case.n_ranks), **sizes)
    scale = None if case.input_scale is None else jnp.float32(case.input_scale)

    def body(tokens, topk_ids, topk_weights, expert_out):
        at_row = suite.weights_for(case.weights, topk_weights)[0]
        codes = quantize(group, tokens, scale)
        options = {"input_scale": scale, "recv_capacity": case.recv_capacity, "is_async": is_async}
        rows = suite.dispatch(group, codes, topk_ids, *at_row, **options)
        assert rows.source_tokens is None
        return suite.fields(rows), expert_out

    inputs = suite.make_inputs(case)
    wanted = suite.expected(case, inputs)
    # XLA refuses a mapped function that uses only empty operands; `expert_out` is not empty.
    run = on_mesh(group.mesh, body)
    for (_, rank), (got, _) in shards(group.mesh, run(*put(group.mesh, *inputs.arrays()[:4]))):
        want = {name: value for name, value in wanted[rank].items() if name in got}
        suite.assert_rank_matches(got, want, inputs.routed.n_rows, f"{case.name}, rank {rank}")


@pytest.mark.parametrize("case", params(CASES))
def test_rows_match_the_oracle(case, transport):
    check_fields(case, transport)


@pytest.mark.parametrize("name", cases.QUANTIZED_NAMES)
def test_asynchronous_calls_match_the_oracle(name, transport):
    check_fields(cases.QUANTIZED_SMALL[name], transport, is_async=True)


@pytest.mark.parametrize("name", cases.QUANTIZED_NAMES)
def test_tokens_with_fewer_elements_match_the_oracle(name, transport):
    check_fields(cases.QUANTIZED_SMALL[name].replace(hidden_size=128), transport, hidden_size=512)


@pytest.mark.usefixtures("one_process")
def test_nodes_that_are_served_by_themselves(transport):
    if transport == "xla":
        pytest.skip("xla serves all nodes at once")
    with each_node_by_itself():
        check_fields(MXFP8.replace(n_nodes=2, scales_layout="row_major"), transport)


def layer(group, is_quantized, tokens, topk_ids, topk_weights):
    if is_quantized:
        tokens = quantize(group, tokens, None)
    rows = jax_ep.dispatch(group, tokens, topk_ids, topk_weights)
    return jax_ep.combine(group, jnp.tanh(jax_ep.dequantize(rows, jnp.bfloat16)), rows)


@pytest.mark.parametrize("leading", [(12,), (2, 6)])
def test_a_layer_has_the_same_bits_and_gradients_of_weights(leading, transport):
    case = MXFP8.replace(weights="row")
    group, inputs = group_of(case, transport), suite.make_inputs(case)

    def body(*operands):
        tokens, topk_ids, topk_weights = (x.reshape(*leading, x.shape[-1]) for x in operands)

        def value_and_gradients(is_quantized):
            def loss(tokens, topk_weights):
                out = layer(group, is_quantized, tokens, topk_ids, topk_weights)
                return jnp.sum(out.astype(jnp.float32) ** 2), out

            gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
            (_, out), (d_tokens, d_weights) = gradient(tokens, topk_weights)
            return (out, d_weights), d_tokens

        return value_and_gradients(True), value_and_gradients(False)

    weights = [np.nan_to_num(each) for each in inputs.topk_weights]
    out = on_mesh(group.mesh, body)(*put(group.mesh, inputs.tokens, inputs.topk_ids, weights))
    (got, d_tokens), (wanted, wanted_d_tokens) = out
    assert_trees_equal(group.mesh, got, wanted, "layer")
    for (_, rank), (gradient, other) in shards(group.mesh, (d_tokens, wanted_d_tokens)):
        assert not gradient.any(), rank  # there is no way through codes
        assert other.any(), rank


def test_codes_arrive_bit_by_bit(transport):
    """Also NaNs, negative zeros and scales that no quantization makes."""
    case = cases.QUANTIZED_SMALL["blockwise_fp8"].replace(routing="out_of_range")
    group, inputs = group_of(case, transport), suite.make_inputs(case)
    rng = np.random.default_rng(0)
    shape = (case.n_ranks, case.n_tokens)
    codes = rng.integers(0, 256, (*shape, 256), np.uint8)
    scales = rng.integers(0, 2**32, (*shape, 2), np.uint32)

    def body(codes, scales, topk_ids):
        codes = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
        scales = jax.lax.bitcast_convert_type(scales, jnp.float32)
        rows = jax_ep.dispatch(group, jax_ep.Quantized(codes, scales), topk_ids)
        as_integers = jax.lax.bitcast_convert_type
        return as_integers(rows.tokens, jnp.uint8), as_integers(rows.scales, jnp.uint32)

    out = on_mesh(group.mesh, body)(*put(group.mesh, codes, scales, inputs.topk_ids))
    for (_, rank), (got_codes, got_scales) in shards(group.mesh, out):
        source, token, _ = inputs.routed.rows[rank].T
        used = source >= 0
        n = len(source)
        wanted = codes[source, token] * used[:, None]
        assert_same_bits(got_codes[:n], wanted.astype(np.uint8), f"codes, rank {rank}")
        wanted = (scales[source, token] * used[:, None]).astype(np.uint32)
        assert_same_bits(got_scales.T[:n], wanted, f"scales, rank {rank}")


def call(group, codes, scales, **options):
    def body(topk_ids):
        tokens = jax_ep.Quantized(jnp.zeros(*codes), jnp.zeros(*scales))
        return jax_ep.dispatch(group, tokens, topk_ids, **options).tokens

    ids = jnp.zeros((4, codes[0][0], MXFP8.top_k), jnp.int32)
    return jax.eval_shape(on_mesh(group.mesh, body).trace, ids)


CODES = ((12, 256), jnp.float8_e4m3fn)
SCALES = ((12, 8), jnp.float8_e8m0fnu)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("codes", "scales", "message"),
    [
        (((12, 288), CODES[1]), SCALES, r"tokens.codes must have the shape \[T, H=256\]; got"),
        (((12, 256), jnp.bfloat16), SCALES, "tokens.codes must be float8_e4m3fn; got bfloat16"),
        (CODES, ((12, 9), SCALES[1]), r"tokens.scales must have the shape \[T=12, S=8\]; got"),
        (CODES, ((11, 8), SCALES[1]), r"tokens.scales must have the shape \[T=12, S=8\]; got"),
        (CODES, ((12, 8), jnp.float32), "tokens.scales must be float8_e8m0fnu; got float32"),
        (((12, 48), CODES[1]), ((12, 1), SCALES[1]), "must be a multiple of 32 for mxfp8"),
        (
            ((13, 256), CODES[1]),
            ((13, 8), SCALES[1]),
            "there must be at most .*=12 tokens on each rank; got 13 on each",
        ),
    ],
)
def test_other_shapes_and_dtypes_are_refused(codes, scales, message, transport):
    with pytest.raises(ValueError, match=message):
        call(group_of(MXFP8, transport), codes, scales)


@pytest.mark.usefixtures("one_process")
def test_a_format_that_does_not_quantize_refuses_codes(transport):
    group = group_of(cases.SMALL[4], transport)
    with pytest.raises(ValueError, match="only if the group's token_format quantizes; it is "):
        call(group, CODES, SCALES)
