"""`EPConfig(row_alignment=...)`: groups of rows padded for grouped matmuls that want it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jax_ep
import suite
from closed_forms import check_closed_forms
from harness import config_of, group_of, make_mesh, on_mesh, params, put, shards


@pytest.mark.parametrize("case", params(cases.ALIGNED))
def test_rows_match_the_oracle(case, transport):
    suite.check(case, transport, make_mesh(case.n_ranks))


@pytest.mark.parametrize("is_async", [True, False])
def test_calls_of_several_routings_match_the_oracle(is_async, transport):
    case = cases.ALIGNED[1]
    for each in cases.every_routing(case):
        suite.check(each, transport, make_mesh(case.n_ranks), is_async=is_async)


@pytest.mark.parametrize("weights", ["none", "source", "row"])
@pytest.mark.parametrize("flags", [{}, cases.FLAGS["shared"]], ids=["plain", "shared"])
def test_gradients_match_their_closed_forms(flags, weights, transport):
    case = cases.SMALL[4].replace(row_alignment=16, weights=weights, **flags)
    check_closed_forms(case, transport)


def test_every_group_begins_at_a_multiple(transport):
    case = cases.SMALL[4].replace(row_alignment=32, routing="zipf")
    group = group_of(case, transport)
    tokens, topk_ids = suite.make_inputs(case).arrays()[:2]
    body = lambda *operands: jax_ep.dispatch(group, *operands).row_offsets  # noqa: E731
    out = on_mesh(group.mesh, body)(*put(group.mesh, tokens, topk_ids))
    for (_, rank), row_offsets in shards(group.mesh, out):
        assert not np.any(row_offsets % 32), rank
        counts = [np.sum(np.stack(topk_ids) == 4 * rank + i) for i in range(4)]
        assert np.diff(row_offsets).tolist() == [-(-n // 32) * 32 for n in counts]


@pytest.mark.thorough
@pytest.mark.usefixtures("one_process")
def test_padding_adds_nothing_to_a_layer(transport):
    """An expert layer and its gradients are those of unpadded groups."""
    case = cases.SMALL[4].replace(token_dtype="float32", combine_dtype="float32", weights="row")
    inputs = suite.make_inputs(case)
    rng = np.random.default_rng(1)
    matrices = rng.standard_normal((4, 4, case.hidden_size, case.hidden_size), np.float32)

    def value_and_gradients(alignment):
        group = group_of(case, transport, row_alignment=alignment)

        def loss(tokens, topk_weights, matrices, topk_ids):
            rows = jax_ep.dispatch(group, tokens, topk_ids, topk_weights)
            results = jax_ep.grouped_matmul(rows.tokens, matrices, rows.row_offsets)
            return jnp.sum(jnp.sin(jax_ep.combine(group, results, rows)))

        def body(tokens, topk_ids, topk_weights, matrices):
            gradient = jax.value_and_grad(loss, argnums=(0, 1, 2))
            return gradient(tokens, topk_weights, matrices, topk_ids)

        operands = (inputs.tokens, inputs.topk_ids, inputs.topk_weights, matrices)
        return jax.tree.map(np.asarray, on_mesh(group.mesh, body)(*put(group.mesh, *operands)))

    with jax.default_matmul_precision("highest"):  # not in TF32
        padded, plain = value_and_gradients(64), value_and_gradients(1)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4), padded, plain)


@pytest.mark.parametrize("value", [0, 2, 512, True, 16.0, "16", [16]])
def test_other_values_are_refused(value):
    with pytest.raises(
        ValueError, match=r"row_alignment must be (one of 1, 4, .*|.*positive.*); got"
    ):
        config_of(cases.SMALL[4], row_alignment=value)


def test_a_capacity_must_hold_whole_groups():
    with pytest.raises(ValueError, match=r"must be a multiple of 16, as row_alignment=16 pads"):
        config_of(cases.SMALL[4], row_alignment=16, recv_capacity=40)
