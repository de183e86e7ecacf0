"""Several nodes: a transport inside each of them, XLA's collectives between them.

Here the nodes are groups of devices of this process, each served by itself although the transport
could serve all at once; test_nodes_processes.py has them in processes of a job. The results must be
the same bits.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import closed_forms
import harness
import jax_ep
import suite
from harness import AXIS, assert_same_bits, config_of, group_of, make_mesh, on_mesh, params, put
from jax_ep.geometry import Geometry
from jax_ep.nodes import connection as nodes
from jax_ep.nodes import overlapped
from jax_ep.nodes.connection import NodesConnection
from node_groups import FOUR, SHARED, TWO, ThriftyRails, forget_groups, with_nodes
from node_groups import by_nodes as by_nodes

CASES = [
    *(TWO.replace(weights=weights) for weights in ("none", "row")),
    FOUR,
    FOUR.replace(n_nodes=8, weights="row"),  # one rank per node
    FOUR.replace(n_nodes=2, **SHARED),
    *with_nodes(cases.DTYPES),
    *with_nodes(cases.EDGE),
    *with_nodes(cases.CAPACITY),
    *with_nodes(cases.FLAGS_SMALL),
    *with_nodes(cases.FLAGS_EDGE),
    *with_nodes(cases.FLAGS_QUANTIZED),
    *with_nodes(cases.QUANTIZED_EDGE),
    *(TWO.replace(row_alignment=n, routing="zipf") for n in (4, 32)),
    TWO.replace(expert_copies=2, routing="one_rank", weights="row"),
    FOUR.replace(expert_copies=1, routing="zipf", **SHARED),
    FOUR.replace(row_alignment=16, weights="row", recv_capacity=96),
    TWO.replace(row_alignment=128, **SHARED),
    TWO.replace(row_alignment=64, token_format="blockwise_fp8", hidden_size=256),
]


def test_nodes_are_served_by_themselves(by_nodes):
    """So the tests below test what they should."""
    with group_of(TWO, by_nodes) as group:
        assert isinstance(group._connection, NodesConnection)
        assert group.transport == by_nodes
        assert (group.n_ranks, group.config.n_nodes) == (4, 2)
        assert group._connection.geometry.routed.n_ranks == 2


@pytest.mark.usefixtures("one_process")
def test_nodes_of_one_process_are_served_together(transport):
    """One node is faster; on CPUs and on a host with GPUs."""
    with harness.each_node_by_itself(False), group_of(TWO, transport) as group:
        assert not isinstance(group._connection, NodesConnection)


@pytest.mark.parametrize("case", params(cases.every_routing(TWO)))
def test_every_routing_matches_the_oracle(case, by_nodes):
    suite.check(case, by_nodes, make_mesh(4))


@pytest.mark.parametrize("case", params(CASES))
def test_every_feature_matches_the_oracle(case, by_nodes):
    harness.skip_if_xla_crashes(case)
    harness.skip_rows_of_no_vectors(case, by_nodes)
    suite.check(case, by_nodes, make_mesh(case.n_ranks))


@pytest.mark.parametrize("weights", ["none", "source", "row"])
def test_asynchronous_calls_match_the_oracle(weights, by_nodes):
    case = TWO.replace(weights=weights, **SHARED)
    suite.check(case, by_nodes, make_mesh(4), is_async=True)


@pytest.mark.parametrize("check_vma", [True, False])
def test_replicas_have_nodes_of_their_own(check_vma, by_nodes):
    suite.check(TWO.replace(routing="zipf"), by_nodes, make_mesh(4, 2), check_vma=check_vma)


@pytest.mark.parametrize("capacity", closed_forms.CAPACITIES)
@pytest.mark.parametrize("weights", closed_forms.MODES)
def test_gradients_match_their_closed_forms(weights, capacity, by_nodes):
    for routing in closed_forms.ROUTINGS:
        case = TWO.replace(weights=weights, recv_capacity=capacity, routing=routing)
        closed_forms.check_closed_forms(case, by_nodes)


@pytest.mark.parametrize("weights", closed_forms.MODES)
def test_gradients_of_padded_groups_match_their_closed_forms(weights, by_nodes):
    closed_forms.check_closed_forms(TWO.replace(weights=weights, row_alignment=16), by_nodes)


@pytest.mark.parametrize(("n_ranks", "n_nodes"), [(2, 2), (8, 2), (8, 4)])
@pytest.mark.parametrize("weights", closed_forms.MODES)
def test_gradients_with_a_shared_expert_match_their_closed_forms(
    weights, n_ranks, n_nodes, by_nodes
):
    case = cases.SMALL[n_ranks].replace(weights=weights, n_nodes=n_nodes, **SHARED)
    closed_forms.check_closed_forms(case.replace(routing="duplicates"), by_nodes)


@pytest.mark.parametrize("case", params(with_nodes(cases.DTYPES)))
def test_gradients_of_every_pair_of_dtypes_match_their_closed_forms(case, by_nodes):
    closed_forms.check_closed_forms(case, by_nodes)


@pytest.mark.parametrize("weights", closed_forms.MODES)
def test_gradients_have_the_bits_of_one_call_for_all_nodes(weights, by_nodes):
    """Those of weights, too, which the oracle only knows within rounding."""
    case = TWO.replace(weights=weights, routing="duplicates", **SHARED)
    got = closed_forms.gradients(case, by_nodes)[-1]
    forget_groups()
    with harness.each_node_by_itself(False):
        wanted = closed_forms.gradients(case, by_nodes)[-1]
    forget_groups()
    for where, results in wanted.items():
        for name, array in results.items():
            assert_same_bits(got[where][name], array, f"{name} of {where}")


@pytest.fixture
def thrifty(by_nodes, monkeypatch):
    """`host` inside nodes, with rails that send no more than they must."""
    if by_nodes != "host":
        pytest.skip("on GPUs, nvshmem itself sends no more")
    forget_groups()
    monkeypatch.setattr(nodes, "XlaRails", ThriftyRails)
    yield by_nodes
    forget_groups()


@pytest.mark.thorough
@pytest.mark.parametrize("weights", ["none", "row", "source"])
def test_what_need_not_travel_is_not_needed(weights, thrifty):
    """Forward and backward, rows of choices included."""
    for routing in ("uniform", "out_of_range", "duplicates"):
        case = FOUR.replace(weights=weights, routing=routing, top_k=2)
        suite.check(case, thrifty, make_mesh(8))
        closed_forms.check_closed_forms(case, thrifty)
    suite.check(TWO.replace(weights=weights, recv_capacity=33, **SHARED), thrifty, make_mesh(4))
    closed_forms.check_gradients_of_unreduced_rows_return_to_their_rows(thrifty)


def test_gradients_of_unreduced_rows_return_to_their_rows(by_nodes):
    closed_forms.check_gradients_of_unreduced_rows_return_to_their_rows(by_nodes)


@pytest.mark.parametrize("weights", closed_forms.MODES)
@pytest.mark.usefixtures("one_process")
def test_gradients_of_a_layer_match_the_dense_layer(weights, by_nodes):
    closed_forms.check_gradients_of_a_layer_match_the_dense_layer(weights, 2, True, by_nodes)


def test_second_derivatives_are_refused(by_nodes):
    """They are on one node; the inter-node collectives must not make them zero."""
    if by_nodes == "xla":
        pytest.skip("xla has second derivatives")
    group = group_of(TWO, by_nodes)
    inputs = suite.make_inputs(TWO)

    def norm_of_gradient(tokens, topk_ids):
        def loss(tokens):
            rows = jax_ep.dispatch(group, tokens, topk_ids)
            out = jax_ep.combine(group, jnp.sin(rows.tokens), rows)
            return jnp.sum(out.astype(jnp.float32) ** 3)

        return jnp.sum(jax.grad(loss)(tokens).astype(jnp.float32) ** 2)

    operands = put(group.mesh, inputs.tokens, inputs.topk_ids)
    overlaps = by_nodes == "nvshmem" and TWO.max_tokens >= overlapped.min_tokens
    call = "jax_ep_rail_dispatch" if overlaps else "jax_ep_dispatch"
    with pytest.raises(NotImplementedError, match=f"Differentiation rule for '{call}'"):
        on_mesh(group.mesh, jax.grad(norm_of_gradient))(*operands)


def test_a_residual_and_weights_at_zero_keep_their_signs(by_nodes):
    """Sums start from +0 on every node; a residual of -0 is added to them."""
    case = TWO.replace(weights="none")

    def change(inputs: suite.Inputs) -> suite.Inputs:
        zeros = [np.full_like(each, -0.0) for each in inputs.residual]
        rows = [np.where(np.isnan(x), x, np.full_like(x, -0.0)) for x in inputs.expert_out]
        return dataclasses.replace(inputs, residual=zeros, expert_out=rows)

    suite.check(case, by_nodes, make_mesh(4), change=change)


def carried(case, inputs: suite.Inputs, rank: int) -> dict:
    """The counts that one dispatch adds to the totals of a rank.

    It carries the tokens of the ranks of its index on all nodes to the ranks of its node.
    """
    per_node = case.n_ranks // case.n_nodes
    node, index = divmod(rank, per_node)
    n_local = case.n_experts // case.n_ranks
    totals = {
        "tokens_to_rank": np.zeros(case.n_ranks, np.int64),
        "rows_to_expert": np.zeros(case.n_experts, np.int64),
    }
    for source in range(index, case.n_ranks, per_node):
        ids = inputs.topk_ids[source]
        for expert in range(node * per_node * n_local, (node + 1) * per_node * n_local):
            totals["rows_to_expert"][expert] += (ids == expert).sum()
        for peer in range(node * per_node, (node + 1) * per_node):
            is_there = (ids >= 0) & (ids < case.n_experts) & (ids // n_local == peer)
            totals["tokens_to_rank"][peer] += is_there.any(axis=1).sum()
    routed = inputs.routed
    return totals | {
        "bytes_to_rank": totals["tokens_to_rank"] * case.hidden_size * 2,
        "rows_per_expert": np.diff(routed.row_offsets[rank].astype(int)),
        "dropped_rows": routed.n_dropped[rank],
        "invalid_ids": routed.n_invalid[rank],
    }


def test_stats_count_what_a_rank_carries(by_nodes):
    case = TWO.replace(routing="out_of_range", recv_capacity=33)
    inputs = suite.make_inputs(case)
    with group_of(case, by_nodes, timeout_s=62.0) as group:  # no other test's group

        def body(tokens, topk_ids):
            dispatched = jax_ep.dispatch(group, tokens, topk_ids)
            return jax_ep.combine(group, dispatched.tokens, dispatched)

        run = on_mesh(group.mesh, body)
        for _ in range(2):
            jax.block_until_ready(run(*put(group.mesh, inputs.tokens, inputs.topk_ids)))
        stats = group.stats()
    assert tuple(totals.rank for totals in stats) == group.ranks
    for totals in stats:
        assert totals.dispatch_calls == totals.combine_calls == 2
        for name, expected in carried(case, inputs, totals.rank).items():
            np.testing.assert_array_equal(getattr(totals, name), np.multiply(2, expected), name)
        node = totals.rank // 2
        assert totals.wait_s.shape == totals.longest_wait_s.shape == (2, 4)
        assert not totals.wait_s[:, 2 * (1 - node) : 2 * (2 - node)].any()


@pytest.mark.usefixtures("one_process")
def test_totals_over_all_ranks_are_those_of_one_node(by_nodes):
    case = TWO.replace(routing="zipf")
    ids = np.stack(suite.make_inputs(case).topk_ids)
    found = np.sum(
        [carried(case, suite.make_inputs(case), r)["rows_to_expert"] for r in range(4)], 0
    )
    np.testing.assert_array_equal(found, np.bincount(ids[ids >= 0], minlength=case.n_experts))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("rank", [0, 3])
def test_errors_name_the_rank_of_all_nodes(rank, by_nodes):
    """Not its index on the node."""
    if by_nodes != "host":
        pytest.skip("the hook that makes a call fail is that of host")
    from jax_ep import _ffi

    case = TWO.replace(recv_capacity=34)
    with group_of(case, by_nodes, timeout_s=5.0) as group:

        def body(tokens, topk_ids):
            return jax_ep.dispatch(group, tokens, topk_ids).tokens

        run = on_mesh(group.mesh, body)
        operands = put(group.mesh, *suite.make_inputs(case).arrays()[:2])
        jax.block_until_ready(run(*operands))
        key = group._connection.geometry.key
        _ffi.fail_next_call(key, group.mesh.devices.flat[rank].id, "on purpose")
        with pytest.raises(jax.errors.JaxRuntimeError, match=rf"rank {rank}: on purpose"):
            jax.block_until_ready(run(*operands))


@pytest.mark.usefixtures("one_process")
def test_a_mesh_with_other_ranks_is_refused(by_nodes):
    if by_nodes != "host":
        pytest.skip("p2p has tests of its own")
    case = TWO.replace(recv_capacity=35)
    with group_of(case, by_nodes) as group:
        other = jax.sharding.Mesh(group.mesh.devices[::-1], group.mesh.axis_names)
        run = on_mesh(other, lambda x, ids: jax_ep.dispatch(group, x, ids).tokens)
        operands = put(other, *suite.make_inputs(case).arrays()[:2])
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"is rank \d of the group, but rank"):
            jax.block_until_ready(run(*operands))


def test_a_node_is_a_replica_of_the_transport_inside():
    mesh = make_mesh(4, 2)
    geometry = Geometry(mesh, AXIS, config_of(TWO), "host", intra_node=True)
    where = [(at.replica, at.rank) for at in geometry.routed_coordinates(geometry.coordinates)]
    assert where == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert [len(replica) for replica in geometry.routed_replicas] == [2] * 4
    assert geometry.max_routed_tokens == 2 * TWO.max_tokens
    assert geometry.routed.n_padded_groups == 4
    assert geometry.routed.n_groups == TWO.n_experts
    assert geometry.key != dataclasses.replace(geometry, intra_node=False).key
