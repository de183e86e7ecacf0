"""A layer in every quantized format: dispatch, two grouped matmuls, combine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jax_ep
import oracle_formats as formats
import suite
from harness import AXIS, group_of, put, shards

# Between all numbers of all tokens and those of the same layer without quantization.
MIN_COSINE = {"blockwise_fp8": 0.999, "mxfp8": 0.998, "nvfp4": 0.985, "mxfp4": 0.975}
# Against simulated quantization: float32 sums differ, and so does the rounding.
MIN_SIMULATED_COSINE = 0.9999
F = 128


def cosine(a, b) -> float:
    a, b = np.ravel(a).astype(np.float64), np.ravel(b).astype(np.float64)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def make_layer(group):
    """The layer over the mesh: experts' matrices are split, inputs have an axis of ranks."""
    token_format, shard = group.config.token_format, jax.P(AXIS)

    def layer(tokens, topk_ids, topk_weights, gate_up, down):
        rows = jax_ep.dispatch(group, tokens[0], topk_ids[0])
        numbers = jax_ep.dequantize(rows, jnp.float32)
        hidden = jax.lax.ragged_dot(numbers, gate_up, rows.group_sizes)
        acts = jax_ep.fused_silu(hidden, rows.row_offsets, token_format)
        acts = token_format.dequantize_rows(acts.tokens, acts.scales, rows.row_offsets)
        results = jax.lax.ragged_dot(acts, down, rows.group_sizes)
        return jax_ep.combine(group, results, rows, topk_weights[0])[None]

    mapped = jax.shard_map(layer, mesh=group.mesh, in_specs=(shard,) * 5, out_specs=shard)
    return jax.jit(mapped)


def dense_layer(inputs, gate_up, down, rounded) -> list[np.ndarray]:
    """The layer's sum, expert by expert; `rounded` is applied to the operands of matmuls."""
    results = []
    for tokens, ids, weights in zip(
        inputs.tokens, inputs.topk_ids, inputs.topk_weights, strict=True
    ):
        x = rounded(tokens)
        out = np.zeros(tokens.shape, np.float64)
        for expert in range(len(gate_up)):
            hidden = formats.silu_times_up(x @ gate_up[expert]).astype(np.float32)
            rows = rounded(hidden) @ down[expert]
            weight = np.where(ids == expert, weights, 0).sum(axis=1)
            out += weight[:, None] * rows
        results.append(out)
    return results


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", MIN_COSINE)
def test_a_layer_is_as_close_as_the_format_allows(name, transport):
    sizes = {"max_tokens": 32, "n_experts": 8, "top_k": 2}
    case = cases.QUANTIZED_SMALL[name].replace(combine_dtype="float32", **sizes)
    group = group_of(case, transport)
    inputs = suite.make_inputs(case)
    rng = np.random.default_rng(5)
    shapes = [(8, case.hidden_size, 2 * F), (8, F, case.hidden_size)]
    matrices = [rng.standard_normal(s, np.float32) / 16 for s in shapes]
    operands = put(group.mesh, inputs.tokens, inputs.topk_ids, inputs.topk_weights)
    with jax.default_matmul_precision("float32"):
        out = make_layer(group)(*operands, *matrices)
    got = [array for _, array in shards(group.mesh, out)]

    def simulated(x):
        return formats.dequantize(name, formats.quantize(name, x))

    plain = dense_layer(inputs, *matrices, lambda x: x.astype(np.float32))
    rounded = dense_layer(inputs, *matrices, simulated)
    assert cosine(got, plain) > MIN_COSINE[name]
    assert cosine(got, plain) < 1 - (1 - MIN_COSINE[name]) / 10
    assert cosine(got, rounded) > MIN_SIMULATED_COSINE
