"""Groups that use the memory of another: the bits of groups with memory of their own."""

import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import harness
import jax_ep
import suite
from harness import AXIS, assert_trees_equal, config_of, group_of, make_mesh, on_mesh, params, put
from jax_ep.geometry import Geometry

SMALL = cases.SMALL[4]
CASES = [
    SMALL.replace(max_tokens=5),
    SMALL.replace(max_tokens=100, weights="row"),
    SMALL.replace(top_k=1, hidden_size=8, recv_capacity=9),
    SMALL.replace(max_tokens=3, top_k=2, weights="none"),
    SMALL.replace(row_alignment=32, weights="row"),
    SMALL.replace(token_dtype="float32", combine_dtype="float32", hidden_size=512),
    SMALL.replace(max_tokens=7, top_k=3, **cases.FLAGS["shared"]),
    SMALL.replace(max_tokens=9, weights="row", **cases.FLAGS["both"]),
    *(cases.QUANTIZED_SMALL[name].replace(weights="row") for name in cases.QUANTIZED_NAMES),
]


def room_for(case, transport: str, mesh=None) -> jax_ep.EPGroup:
    """A group that is larger than those of all cases in everything that may differ."""
    return group_of(
        case,
        transport,
        mesh,
        top_k=7,
        hidden_size=512,
        max_tokens_per_rank=150,
        token_format=jax_ep.Plain(jnp.float32),
        combine_dtype=jnp.float32,
        row_alignment=1,
        recv_capacity=None,
    )


def group_in(memory_of: jax_ep.EPGroup, case, **changes) -> jax_ep.EPGroup:
    """A group for a case in the memory of another."""
    config = config_of(case, **changes)
    return jax_ep.ep_init(memory_of.mesh, AXIS, config, memory_of=memory_of)


@pytest.mark.thorough
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("case", params(CASES))
def test_results_match_the_oracle(case, is_async, transport):
    mesh = make_mesh(case.n_ranks)
    memory_of = room_for(case, transport, mesh)
    suite.check(case, transport, mesh, is_async=is_async, memory_of=memory_of)


@pytest.mark.usefixtures("one_process")
def test_results_match_the_oracle_where_each_node_is_served_by_itself(transport):
    if transport == "xla":
        pytest.skip("xla serves all nodes at once")
    case = SMALL.replace(n_nodes=2, max_tokens=5)
    with harness.each_node_by_itself():
        mesh = make_mesh(case.n_ranks)
        memory_of = room_for(case, transport, mesh)
        suite.check(case, transport, mesh, memory_of=memory_of)
        assert group_in(memory_of, case).memory == memory_of.memory


ONE = SMALL.replace(max_tokens=90)
OTHER = SMALL.replace(max_tokens=6, top_k=2, hidden_size=256, token_format="mxfp8")


def operands_of(case):
    inputs = suite.make_inputs(case)
    weights = [np.nan_to_num(each) for each in inputs.topk_weights]
    return inputs.tokens, inputs.topk_ids, weights


def experts(rows):
    """Of any format; as wide as the tokens."""
    results = jnp.tanh(jax_ep.dequantize(rows))
    return results.astype(rows.group.config.combine_dtype)


def rounds_in_turns(groups, is_async: bool, operands) -> list:
    """Two rounds of both groups, whose calls alternate; or are started before the other's."""
    (x, ids, weights), (other_x, other_ids, other_weights) = operands
    one, other = groups
    for _ in range(2):
        if is_async:
            in_flight = jax_ep.dispatch_async(one, x, ids)
            other_rows = jax_ep.dispatch(other, other_x, other_ids, other_weights)
            rows = jax_ep.dispatch_wait(one, in_flight)
        else:
            rows = jax_ep.dispatch(one, x, ids)
            other_rows = jax_ep.dispatch(other, other_x, other_ids, other_weights)
        other_x = jax_ep.combine(other, experts(other_rows), other_rows)
        x = jax_ep.combine(one, experts(rows), rows, weights)
    return [x, other_x]


@pytest.mark.thorough
@pytest.mark.parametrize("is_async", [False, True])
def test_calls_and_gradients_of_several_groups_in_turns(is_async, transport):
    mesh = make_mesh(SMALL.n_ranks)
    memory_of = room_for(SMALL, transport, mesh)

    def results(groups):
        def loss(numbers, ids):
            operands = [(x, i, w) for (x, w), i in zip(numbers, ids, strict=True)]
            outs = rounds_in_turns(groups, is_async, operands)
            return sum(jnp.sum(out.astype(jnp.float32) ** 2) for out in outs), outs

        def body(x, ids, weights, *of_other):
            numbers = (x, weights), of_other[::2]
            return jax.value_and_grad(loss, has_aux=True)(numbers, (ids, of_other[1]))

        return on_mesh(mesh, body)(*put(mesh, *operands_of(ONE), *operands_of(OTHER)))

    shared = results([group_in(memory_of, each) for each in (ONE, OTHER)])
    separate = results([group_of(each, transport, mesh) for each in (ONE, OTHER)])
    assert_trees_equal(mesh, shared, separate, "in turns")


def test_memory_is_that_of_the_largest(transport):
    with (
        room_for(SMALL, transport) as large,
        group_in(large, SMALL) as small,
        group_of(SMALL, transport) as separate,
    ):
        assert small.memory == large.memory
        assert small.transport == large.transport == transport
        if transport in ("xla", "host"):
            assert large.memory == 0
        else:
            assert (small.dev_ptrs == large.dev_ptrs).all()
            assert 0 < separate.memory < large.memory


def test_equal_groups_are_one_group(transport):
    with room_for(SMALL, transport) as large, group_in(large, SMALL) as small:
        assert small == group_in(large, SMALL)
        assert small == group_in(small, SMALL)  # the memory is that of `large`
        assert hash(small) == hash(group_in(small, SMALL))
        assert small.max_recv_tokens == group_of(SMALL, transport).max_recv_tokens
        own = [group_of(SMALL, transport), group_in(group_of(ONE, transport), SMALL)]
        assert len({small.key, *(each.key for each in own)}) == 3
        again = jax_ep.ep_init(large.mesh, AXIS, large.config, memory_of=large)
        assert again == large
        assert again.geometry.memory_of is None


def test_inside_nodes_the_memory_is_that_of_the_transport_inside():
    mesh = make_mesh(4)
    config = config_of(SMALL, n_nodes=2)
    large = Geometry(mesh, AXIS, config, "p2p", intra_node=True)
    small = Geometry(mesh, AXIS, config_of(OTHER, n_nodes=2), "p2p", True, memory_of=large)
    assert large.memory_key == large.key == small.memory_key
    outside = Geometry(mesh, AXIS, config_of(OTHER, n_nodes=2), "p2p", memory_of=large)
    assert small.key == f"{outside.key}-intra-node"


def call_of(group, case):
    """A function without arguments that makes a dispatch and a combine."""

    def body(tokens, topk_ids, weights):
        rows = jax_ep.dispatch(group, tokens, topk_ids)
        return jax_ep.combine(group, rows.tokens, rows, weights)

    operands = put(group.mesh, *operands_of(case))
    compiled = on_mesh(group.mesh, body).compile(*operands)
    return lambda: jax.block_until_ready(compiled(*operands))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_groups_close_in_any_order(order, transport):
    all_cases = [SMALL.replace(max_tokens=20), SMALL.replace(max_tokens=2), SMALL]
    large = group_of(SMALL, transport, max_tokens_per_rank=40, timeout_s=42)
    groups = [group_in(large, case, timeout_s=42) for case in all_cases]
    calls = [call_of(*each) for each in zip(groups, all_cases, strict=True)]
    wanted = [call() for call in calls]
    large.close()
    for n_closed, closing in enumerate(order, 1):
        groups[closing].close()
        for i in order[n_closed:]:
            assert_trees_equal(large.mesh, calls[i](), wanted[i], "a group that is open")
        if transport != "xla":
            with pytest.raises(jax.errors.JaxRuntimeError, match="is not open"):
                calls[closing]()


def test_groups_open_again_in_memory_that_outlived_them(transport):
    sizes = {"max_tokens_per_rank": 40, "timeout_s": 43}
    large = group_of(SMALL, transport, **sizes)
    small = group_in(large, SMALL, timeout_s=43)
    calls = call_of(large, SMALL), call_of(small, SMALL)
    wanted = [call() for call in calls]
    large.close()
    large = group_of(SMALL, transport, **sizes)
    small.close()
    small = group_in(large, SMALL, timeout_s=43)
    assert small.memory == large.memory
    for call, values in zip(calls, wanted, strict=True):
        assert_trees_equal(large.mesh, call(), values, "opened again")
    large.close()
    small.close()


@pytest.mark.usefixtures("one_process")
def test_a_pickled_group_is_opened_again(transport):
    with room_for(SMALL, transport) as large, group_in(large, SMALL) as small:
        data = pickle.dumps({"large": large, "small": small})
        again = pickle.loads(data)
        assert again == {"large": large, "small": small}
    for each in again.values():
        each.close()
    alone = pickle.loads(pickle.dumps(again["small"]))  # opens the memory, too
    assert not alone.closed
    assert alone == small
    alone.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_experts": 32}, "the same n_experts; got 32, it has 16. Leave memory_of out"),
        ({"fused_shared_expert": True}, "the same fused_shared_expert; got True, it has False"),
        ({"skip_a2a": True}, "the same skip_a2a; got True, it has False"),
        ({"timeout_s": 5}, "the same timeout_s; got 5.0, it has 60.0"),
        ({"n_nodes": 4}, r"the same \(n_gpus_per_node, n_nodes\); got \(1, 4\), it has"),
        ({"top_k": 5}, "room for top_k=5; it has room for top_k=4. First make a group with the"),
        ({"max_tokens_per_rank": 25}, "room for max_tokens_per_rank=25; it has room for "),
        ({"hidden_size": 136}, "room for 272 bytes per token or row; it has room for 256 bytes"),
        ({"combine_dtype": jnp.float32}, "512 bytes per token or row; it has room for 256"),
    ],
)
def test_groups_that_do_not_fit_are_refused(changes, message, transport):
    with (
        group_of(SMALL, transport) as group,
        pytest.raises(ValueError, match=f"memory_of must be a group .*{message}"),
    ):
        group_in(group, SMALL, **changes)


def test_memory_of_another_mesh_or_transport_is_refused(transport):
    group = group_of(SMALL, transport)
    config = config_of(SMALL)
    ids = group.geometry.device_ids
    meshes = {
        rf"of devices \{ids[::-1]}, it has .* of devices \{ids}\. Leave": jax.sharding.Mesh(
            group.mesh.devices[::-1], group.mesh.axis_names
        ),
        r"'dp': 2, .*, it has Mesh\('ep': 4, ": jax.sharding.Mesh(
            group.mesh.devices.reshape(2, 2), ("dp", AXIS)
        ),
    }
    for described, mesh in meshes.items():
        message = f"memory_of must be a group of the same mesh and axis; got Mesh.*{described}"
        with pytest.raises(ValueError, match=message):
            jax_ep.ep_init(mesh, AXIS, config, memory_of=group)
    if transport != "xla":
        with pytest.raises(ValueError, match=f"same transport; got 'xla', it has '{transport}'"):
            jax_ep.ep_init(group.mesh, AXIS, config, "xla", memory_of=group)
    group.close()
    with pytest.raises(ValueError, match=f"memory_of must be open; group {group.key} is closed"):
        group_in(group, SMALL)
    with pytest.raises(TypeError, match="memory_of must be an EPGroup made by ep_init; got str"):
        jax_ep.ep_init(group.mesh, AXIS, config, memory_of=group.key)
