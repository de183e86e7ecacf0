"""A layer in every format, from dispatch through two grouped matmuls to combine."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jax_ep
import oracle_formats as formats
import suite
from harness import AXIS, config_of, make_mesh, place, shards

# Of all numbers of all tokens, against the same layer without quantisation.
LEAST_COSINE = {"blockwise_fp8": 0.999, "mxfp8": 0.998, "nvfp4": 0.985, "mxfp4": 0.975}
# Against simulated quantisation: rounding differs where float32 sums do.
LEAST_SIMULATED_COSINE = 0.9999
F = 128


def cosine(a, b) -> float:
    a, b = np.ravel(a).astype(np.float64), np.ravel(b).astype(np.float64)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def make_layer(group, token_format):
    def layer(tokens, topk_ids, topk_weights, gate_up, down):
        rows = jax_ep.dispatch(group, tokens, topk_ids)
        numbers = jax_ep.dequantize(rows, jnp.float32)
        hidden = jax.lax.ragged_dot(numbers, gate_up, rows.group_sizes)
        acts = jax_ep.fused_silu(hidden, rows.row_offsets, token_format)
        acts = token_format.dequantize_rows(acts.tokens, acts.scales, rows.row_offsets)
        results = jax.lax.ragged_dot(acts, down, rows.group_sizes)
        return jax_ep.combine(group, results, rows, topk_weights)

    return layer


def dense_layer(inputs, gate_up, down, rounded) -> list[np.ndarray]:
    """The same sum, token by token; `rounded` is what becomes of matmul operands."""
    n_local = len(gate_up) // len(inputs.tokens)
    assert n_local * len(inputs.tokens) == len(gate_up)
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
@pytest.mark.parametrize("name", LEAST_COSINE)
def test_a_layer_is_as_near_as_the_format_allows(name, transport):
    case = cases.QUANTISED_SMALL[name].but(
        combine_dtype="float32", max_tokens=32, n_experts=8, top_k=2
    )
    mesh = make_mesh(4)
    group = jax_ep.ep_init(mesh, AXIS, config_of(case), transport)
    inputs = suite.make_inputs(case)
    rng = np.random.default_rng(5)
    shapes = [(8, case.hidden_size, 2 * F), (8, F, case.hidden_size)]
    gate_up, down = (rng.standard_normal(s, np.float32) / 16 for s in shapes)
    shard = jax.P(AXIS)
    layer = make_layer(group, config_of(case).token_format)
    with jax.default_matmul_precision("float32"):
        out = jax.jit(
            jax.shard_map(
                lambda *xs: layer(*(x[0] for x in xs[:3]), *xs[3:])[None],
                mesh=mesh,
                in_specs=(shard,) * 5,
                out_specs=shard,
            )
        )(
            *(
                place(mesh, [x])
                for x in (inputs.tokens, inputs.topk_ids, inputs.topk_weights)
            ),
            gate_up,
            down,
        )
    got = [array for _, array in shards(mesh, out)]

    def simulated(x):
        return formats.dequantize(name, formats.quantize(name, x))

    plain = dense_layer(inputs, gate_up, down, lambda x: x.astype(np.float32))
    rounded = dense_layer(inputs, gate_up, down, simulated)
    assert cosine(got, plain) > LEAST_COSINE[name]
    assert cosine(got, plain) < 1 - (1 - LEAST_COSINE[name]) / 10
    assert cosine(got, rounded) > LEAST_SIMULATED_COSINE
