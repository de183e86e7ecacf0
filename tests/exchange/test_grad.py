"""Gradients: closed forms, finite differences, and JAX's own differentiation.

The contract fixes the arithmetic of the backward passes, so `d_tokens`, `d_expert_out` and
`d_residual` are compared bitwise on transports that have their own; JAX differentiates `xla` and
may add in another order, so there they are compared within rounding. The cotangent of a weight is a
sum over H in no fixed order on any transport.
"""

import dataclasses

import jax
import jax.test_util
import numpy as np
import pytest

import cases
import jax_ep
import suite
from closed_forms import (
    CAPACITIES,
    MODES,
    assert_close,
    check_closed_forms,
    check_gradients_match_their_closed_forms,
    check_gradients_of_a_layer_match_the_dense_layer,
    check_gradients_of_unreduced_rows_return_to_their_rows,
    float32_layer,
    gradients,
)
from harness import assert_same_bits, group_of, on_mesh, put, shards


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("weights", MODES)
def test_gradients_match_their_closed_forms(weights, capacity, check_vma, transport):
    check_gradients_match_their_closed_forms(weights, capacity, check_vma, transport)


@pytest.mark.parametrize("case", cases.DTYPES, ids=lambda case: case.name)
def test_gradients_match_their_closed_forms_for_every_pair_of_dtypes(case, transport):
    check_closed_forms(case, transport)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("n_ranks", "n_nodes"), [(4, 2), (8, 2), (8, 4)])
def test_gradients_on_several_nodes_match_their_closed_forms(n_ranks, n_nodes, dtype, transport):
    """The backward of dispatch rounds the sums of ranks and nodes as combine does."""
    dtypes = {"token_dtype": dtype, "combine_dtype": dtype}
    case = cases.SMALL[n_ranks].replace(n_nodes=n_nodes, **dtypes, **cases.FLAGS["shared"])
    check_closed_forms(case.replace(routing="duplicates"), transport)


def test_gradients_of_unreduced_rows_return_to_their_rows(transport):
    check_gradients_of_unreduced_rows_return_to_their_rows(transport)


@pytest.mark.usefixtures("one_process")
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what transport host does")
def test_the_gradients_of_unused_rows_are_nan():
    """They are undefined, as on GPUs, so code that relies on them should fail on CPUs, too."""
    case = cases.SMALL[4].replace(weights="row", routing="with_minus_one")
    group, inputs = group_of(case, "host"), suite.make_inputs(case)

    def body(tokens, topk_ids, topk_weights, expert_out, residual):
        dispatched = jax_ep.dispatch(group, tokens, topk_ids, topk_weights)

        def combined(expert_out, row_weights):
            rows = dataclasses.replace(dispatched, row_weights=row_weights)
            return jax_ep.combine(group, expert_out, rows)

        return jax.vjp(combined, expert_out, dispatched.row_weights)[1](residual)

    out = on_mesh(group.mesh, body)(*put(group.mesh, *inputs.arrays()))
    for (_, rank), grads in shards(group.mesh, out):
        used = len(inputs.routed.rows[rank])
        for grad in grads:
            assert used < len(grad) and np.isnan(grad[used : used + 64]).all(), f"rank {rank}"
            assert np.isfinite(grad[:used]).all(), f"rank {rank}"


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("weights", MODES)
def test_gradients_of_a_layer_match_the_dense_layer(weights, dp, check_vma, transport):
    check_gradients_of_a_layer_match_the_dense_layer(weights, dp, check_vma, transport)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("weights", MODES)
def test_gradients_match_finite_differences(weights, transport):
    """In float32; eps = 2^-6 keeps both errors of the difference below 1e-3."""
    moe, operands, _ = float32_layer(weights, transport)
    tolerances = {"atol": 3e-3, "rtol": 3e-3, "eps": 2**-6}
    jax.test_util.check_grads(moe, operands, order=1, modes=["rev"], **tolerances)


@pytest.mark.parametrize("weights", MODES)
def test_two_runs_give_the_same_gradients_bitwise(weights, transport):
    case = cases.SMALL[4].replace(weights=weights, routing="duplicates")
    first, second = (gradients(case, transport)[-1] for _ in range(2))
    for where, results in first.items():
        for name, array in results.items():
            assert_same_bits(second[where][name], array, f"{name} of {where}")


@pytest.mark.xla_collectives
@pytest.mark.parametrize("weights", MODES)
def test_gradients_agree_with_those_of_transport_xla(weights, transport):
    if transport == "xla":
        pytest.skip("compares the other transports with xla")
    case = cases.SMALL[4].replace(weights=weights, routing="zipf")
    got, wanted = (gradients(case, name)[-1] for name in (transport, "xla"))
    for where, results in wanted.items():
        for name, array in results.items():
            assert_close(got[where][name], array, array.dtype, f"{name} of {where}")
