"""Groups over several axes of a mesh: the ranks are the product of the axes, in order."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

import cases
import jax_ep
import suite
from harness import assert_same_bits, config_of, make_mesh
from jax_ep.geometry import Geometry

CASE = cases.SMALL[4].replace(routing="with_minus_one", weights="source")
SIZES = {"dp": 2, "context": 2, "expert": 2}
# Names of the mesh's axes, in order; those of the group's.
LAYOUTS = {
    "all axes": (("context", "expert"), ("context", "expert")),
    "in another order": (("context", "expert"), ("expert", "context")),
    "behind a replica's": (("dp", "context", "expert"), ("context", "expert")),
    "around a replica's": (("context", "dp", "expert"), ("expert", "context")),
}


def open_group(name, transport, case=CASE):
    mesh_axes, axes = LAYOUTS[name]
    sizes = [SIZES[axis] for axis in mesh_axes]
    devices = make_mesh(int(np.prod(sizes))).devices.reshape(sizes)
    return jax_ep.ep_init(jax.sharding.Mesh(devices, mesh_axes), axes, config_of(case), transport)


def ranks_of(group) -> dict:
    """(replica, rank) of each device."""
    indices = dict(zip(group.mesh.axis_names, np.indices(group.mesh.devices.shape), strict=True))
    first, second = (indices[name] for name in group.axis_name)
    ranks = 2 * first + second
    replicas = indices.get("dp", np.zeros_like(ranks))
    pairs = zip(replicas.flat, ranks.flat, strict=True)
    return {d: (int(x), int(y)) for d, (x, y) in zip(group.mesh.devices.flat, pairs, strict=True)}


def operands_of(group, case=CASE) -> list[jax.Array]:
    """Each rank's operands of `suite.forward`, on its device."""
    where = ranks_of(group)
    n_replicas = 1 + max(replica for replica, _ in where.values())
    arrays = [suite.make_inputs(case, None, r).arrays() for r in range(n_replicas)]
    spec = P(group.mesh.axis_names)
    result = []
    for i in range(len(arrays[0])):
        stacked = np.stack([arrays[replica][i][rank] for replica, rank in where.values()])
        sharding = jax.NamedSharding(group.mesh, spec)
        result.append(jax.make_array_from_callback(stacked.shape, sharding, stacked.__getitem__))
    return result


def run(group, body, operands):
    """The results of a per-rank function by (replica, rank), for the devices of this process."""

    def on_rank(*args):
        return jax.tree.map(lambda x: x[None], body(*(x[0] for x in args)))

    spec = P(group.mesh.axis_names)
    out = jax.jit(jax.shard_map(on_rank, mesh=group.mesh, in_specs=spec, out_specs=spec))(*operands)
    leaves, treedef = jax.tree.flatten(out)
    by_rank = {}
    for device, rank in ranks_of(group).items():
        if device.process_index != jax.process_index():
            continue
        shards = ([s.data for s in x.addressable_shards if s.device == device] for x in leaves)
        local = [np.asarray(data)[0] for (data,) in shards]
        by_rank[rank] = jax.tree.unflatten(treedef, local)
    return by_rank


@pytest.mark.parametrize("flags", [{}, *cases.FLAGS.values()], ids=["", *cases.FLAGS])
@pytest.mark.parametrize("name", LAYOUTS)
def test_results_over_several_axes_match_the_oracle(name, flags, transport):
    case = CASE.replace(**flags)
    group = open_group(name, transport, case)
    out = run(group, suite.forward(group, case.weights), operands_of(group, case))
    for (replica, rank), got in out.items():
        inputs = suite.make_inputs(case, None, replica)
        wanted = suite.expected(case, inputs)[rank]
        what = f"{name}, replica {replica}, rank {rank}"
        suite.assert_rank_matches(got, wanted, inputs.routed.n_rows, what)


def layer_and_gradients(group, tokens, topk_ids, topk_weights, *_):
    def loss(tokens, topk_weights):
        rows = jax_ep.dispatch(group, tokens, topk_ids, topk_weights)
        results = jnp.tanh(jax_ep.dequantize(rows))
        out = jax_ep.combine(group, results, rows)
        return jnp.sum(out.astype(jnp.float32) ** 2), rows.row_source_ranks

    grads, ranks = jax.grad(loss, argnums=(0, 1), has_aux=True)(
        tokens, jnp.nan_to_num(topk_weights)
    )
    return *grads, ranks


@pytest.mark.thorough
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_and_source_ranks_are_those_of_one_axis(name, transport):
    group = open_group(name, transport)
    plain = jax_ep.ep_init(make_mesh(4), "ep", config_of(CASE), transport)
    got = run(group, functools.partial(layer_and_gradients, group), operands_of(group))
    spec, names = P("ep"), ("d_tokens", "d_weights", "row_source_ranks")
    body = functools.partial(layer_and_gradients, plain)
    for replica in range(1 + max(replica for replica, _ in got)):
        arrays = [np.stack(x) for x in suite.make_inputs(CASE, None, replica).arrays()]

        @functools.partial(jax.shard_map, mesh=plain.mesh, in_specs=spec, out_specs=spec)
        def on_rank(*args):
            return jax.tree.map(lambda x: x[None], body(*(x[0] for x in args)))

        wanted = [np.asarray(x) for x in jax.jit(on_rank)(*arrays)]
        for rank in range(4):
            for what, one, all_ranks in zip(names, got[replica, rank], wanted, strict=True):
                assert_same_bits(one, all_ranks[rank], f"{what}, rank {rank}")


@pytest.mark.usefixtures("one_process")
def test_a_rank_holds_the_experts_of_its_shard(transport):
    """An array of experts that is sharded by `P(axis_name)` is where its rows arrive."""
    group = open_group("around a replica's", transport)
    scale = np.arange(1, CASE.n_experts + 1, dtype=np.float32)
    tokens, ids = (x for x in operands_of(group)[:2])
    spec = P(group.mesh.axis_names)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=group.mesh, in_specs=(spec, spec, P(group.axis_name)), out_specs=spec
    )
    def layer(tokens, ids, scale):
        rows = jax_ep.dispatch(group, tokens[0], ids[0])
        scaled = scale[rows.row_expert_ids][:, None].astype(jnp.bfloat16)
        results = suite.clear_unused(jnp.ones_like(rows.tokens) * scaled, rows.row_offsets)
        return jax_ep.combine(group, results, rows, reduce=False)[None, ..., 0]

    out, ids = np.asarray(layer(tokens, ids, scale), np.float32), np.asarray(ids)
    np.testing.assert_array_equal(out, np.where(ids >= 0, scale[ids], 0))


def test_one_axis_in_a_tuple_is_that_axis(transport):
    mesh, config = make_mesh(4), config_of(CASE)
    one, other = (jax_ep.ep_init(mesh, name, config, transport) for name in ("ep", ("ep",)))
    assert one == other
    assert one.key == other.key
    assert other.axis_name == "ep"


@pytest.mark.usefixtures("one_process")
def test_the_order_of_the_axes_makes_another_group(transport):
    one, other = (open_group(name, transport) for name in ("all axes", "in another order"))
    assert one != other
    assert one.n_ranks == other.n_ranks == 4
    assert one.ranks == (0, 1, 2, 3)
    assert other.ranks == (0, 2, 1, 3)


@pytest.mark.parametrize("names", [(), ("context", "context"), ("context", "tp"), "tp", None])
def test_the_axes_must_be_different_ones_of_the_mesh(names):
    mesh = open_group("all axes", "xla").mesh
    with pytest.raises(ValueError, match="axis_name must be"):
        Geometry(mesh, names, config_of(CASE), "xla")


@pytest.mark.usefixtures("one_process")
def test_a_call_inside_a_map_over_one_of_the_axes_raises(transport):
    group = open_group("all axes", transport)

    @functools.partial(
        jax.shard_map, mesh=group.mesh, in_specs=P("expert"), out_specs=P(), axis_names={"expert"}
    )
    def call(x):
        tokens = jnp.zeros((4, CASE.hidden_size), jnp.bfloat16)
        return jax_ep.dispatch(group, tokens, jnp.zeros((4, CASE.top_k), jnp.int32)).n_dropped

    with pytest.raises(ValueError, match=r"over the axes \('context', 'expert'\)"):
        jax.eval_shape(jax.jit(call), jnp.zeros(2))
