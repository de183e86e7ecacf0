"""A `Dispatched` that leaves one `jax.shard_map` and enters another.

Scalars have no axis to map, so all leaves get a leading one: `harness.on_mesh` does what
docs/sharp_bits.md tells users to do.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jax_ep
import suite
from closed_forms import assert_equal
from harness import group_of, on_mesh_eager, put

CASES = {
    "plain": cases.SMALL[4],
    "row": cases.SMALL[4].replace(weights="row"),
    "shared": cases.SMALL[4].replace(**cases.FLAGS["shared"]),
    "quantized": cases.QUANTIZED_SMALL["mxfp8"],
    "nodes": cases.SMALL[4].replace(n_nodes=2),
}


def send(group, weights_at, tokens, topk_ids, topk_weights):
    return jax_ep.dispatch(group, tokens, topk_ids, *suite.weights_for(weights_at, topk_weights)[0])


def experts(group, rows, scale):
    return jnp.tanh(jax_ep.dequantize(rows, group.config.combine_dtype) * scale)


def collect(group, weights_at, results, rows, topk_weights):
    at_source = suite.weights_for(weights_at, topk_weights)[1]
    return jax_ep.combine(group, results, rows, *at_source)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", CASES)
def test_three_maps_are_one(name, transport):
    case = CASES[name]
    group, weights = group_of(case, transport), case.weights
    inputs = suite.make_inputs(case)
    scale = [np.full(case.hidden_size, 0.5, case.combine_dtype)] * case.n_ranks
    topk_weights = [np.nan_to_num(each) for each in inputs.topk_weights]
    operands = put(group.mesh, inputs.tokens, inputs.topk_ids, topk_weights, scale)
    maps = [
        on_mesh_eager(group.mesh, functools.partial(body, group, *options))
        for body, options in ((send, [weights]), (experts, []), (collect, [weights]))
    ]

    def in_three(tokens, topk_ids, topk_weights, scale):
        rows = maps[0](tokens, topk_ids, topk_weights)
        return maps[2](maps[1](rows, scale), rows, topk_weights)

    def body(tokens, topk_ids, topk_weights, scale):
        rows = send(group, weights, tokens, topk_ids, topk_weights)
        return collect(group, weights, experts(group, rows, scale), rows, topk_weights)

    def value_and_gradients(layer):
        def loss(tokens, topk_weights, scale):
            out = layer(tokens, operands[1], topk_weights, scale)
            return jnp.sum(out.astype(jnp.float32) ** 2), out

        gradient = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
        (_, out), gradients = jax.jit(gradient)(operands[0], *operands[2:])
        return out, gradients

    got, wanted = map(value_and_gradients, (in_three, on_mesh_eager(group.mesh, body)))
    assert_equal(group, got, wanted, name)
