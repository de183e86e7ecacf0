"""`count_choices`, `limit_choices` and `Dispatched.expert_counts`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jax_ep
import suite
from harness import group_of, on_mesh, put, shards
from jax_ep.exchange.choices import order_of

E = 6


def make_ids(shape, dtype=np.int32, low=-2) -> np.ndarray:
    return np.random.default_rng(0).integers(low, E + 2, shape).astype(dtype)


def keep_first(ids: np.ndarray, capacity: int) -> np.ndarray:
    """One choice after the other."""
    seen, kept = [0] * E, ids.copy().reshape(-1)
    for i, expert in enumerate(kept):
        if 0 <= expert < E:
            seen[expert] += 1
            if seen[expert] > capacity:
                kept[i] = -1
    return kept.reshape(ids.shape)


@pytest.mark.parametrize("shape", [(40, 3), (2, 5, 4), (0, 2), (1, 1)])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_counts_are_those_of_numpy(shape, wrap):
    ids = make_ids(shape)
    counts = wrap(lambda ids: jax_ep.count_choices(ids, E))(ids)
    assert counts.dtype == jnp.int32
    assert counts.tolist() == [int(np.sum(ids == e)) for e in range(E)]


@pytest.mark.parametrize("capacity", [0, 1, 3, 1000, 2**33])
@pytest.mark.parametrize("shape", [(40, 3), (2, 5, 4), (0, 2), (512, 2), (1025, 1), (700, 4)])
def test_the_first_choices_of_each_expert_are_kept(shape, capacity):
    ids = make_ids(shape)
    kept = jax.jit(lambda ids: jax_ep.limit_choices(ids, E, capacity))(ids)
    np.testing.assert_array_equal(kept, keep_first(ids, capacity))
    assert int(jax_ep.count_choices(kept, E).max(initial=0)) <= capacity


@pytest.mark.parametrize("n", [0, 1, 5])
def test_the_order_of_keys_is_that_of_numpy(n):
    keys = np.random.default_rng(0).integers(0, 3, (20, n))
    order = order_of(jnp.asarray(keys), 3)
    np.testing.assert_array_equal(order, np.argsort(keys, axis=-1, kind="stable"))
    assert order.dtype == jnp.int32


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int64", "uint64"])
def test_ids_may_have_any_integer_dtype(dtype):
    ids = make_ids((30, 4), dtype, low=0)
    assert jax_ep.count_choices(ids, E).tolist() == [int(np.sum(ids == e)) for e in range(E)]
    kept = jax_ep.limit_choices(ids, E, 2)
    assert kept.dtype == jnp.int32
    np.testing.assert_array_equal(kept, keep_first(ids.astype(np.int32), 2))


def test_without_experts_no_choice_is_dropped():
    ids = make_ids((5, 2))
    np.testing.assert_array_equal(jax_ep.limit_choices(ids, 0, 0), ids)


@pytest.mark.parametrize("capacity", [-1, 1.25, True, float("nan"), None])
def test_other_capacities_are_refused(capacity):
    with pytest.raises(ValueError, match="limit_choices: capacity must be an integer, 0 or more; "):
        jax_ep.limit_choices(jnp.zeros((4, 2), jnp.int32), E, capacity)


@pytest.mark.parametrize("ids", [jnp.zeros((4, 2)), jnp.zeros((4, 2), bool), None])
def test_ids_must_be_integers(ids):
    with pytest.raises(ValueError, match="count_choices: topk_ids must be (integers|an array)"):
        jax_ep.count_choices(ids, E)


@pytest.mark.parametrize("n_experts", [-1, 8.0, "8"])
def test_the_number_of_experts_must_be_a_count(n_experts):
    with pytest.raises(ValueError, match="count_choices: n_experts must be an integer"):
        jax_ep.count_choices(jnp.zeros((4, 2), jnp.int32), n_experts)


@pytest.mark.xla_collectives
@pytest.mark.parametrize("flags", [{}, *cases.FLAGS.values()], ids=["plain", *cases.FLAGS])
def test_every_rank_sees_the_counts_of_all(flags, transport):
    case = cases.SMALL[4].replace(routing="out_of_range", recv_capacity=32, **flags)
    group, inputs = group_of(case, transport), suite.make_inputs(case)

    def body(tokens, topk_ids):
        rows = jax_ep.dispatch(group, tokens, topk_ids)
        limited = jax_ep.limit_choices(topk_ids, case.n_experts, 2)
        return rows.expert_counts, jax_ep.dispatch(group, tokens, limited).expert_counts

    wanted = [
        [int(np.sum(ids == e)) for e in range(case.n_experts)] for ids in np.stack(inputs.topk_ids)
    ]
    out = on_mesh(group.mesh, body)(*put(group.mesh, inputs.tokens, inputs.topk_ids))
    for (_, rank), (counts, limited) in shards(group.mesh, out):
        np.testing.assert_array_equal(counts, wanted, f"rank {rank}")
        np.testing.assert_array_equal(limited, np.minimum(wanted, 2), f"rank {rank}")


def keep_first_of_ranks(ids: np.ndarray, capacity: int) -> np.ndarray:
    """One choice after the other: rank, then token, then k."""
    return keep_first(ids.reshape(-1, *ids.shape[2:]), capacity).reshape(ids.shape)


def test_ranks_before_have_the_first_choices():
    """By hand: 2 ranks, experts 0 and 1; each keeps 3 of its choices."""
    ids = np.array([[[0, 1], [0, -1], [1, 0]], [[1, 0], [1, 0], [7, 1]]])
    wanted = np.array([[[0, 1], [0, -1], [1, 0]], [[1, -1], [-1, -1], [7, -1]]])
    np.testing.assert_array_equal(keep_first_of_ranks(ids, 3), wanted)


def limit_over_ranks(axes, over, ids, capacity, wrap=jax.jit):
    """`ids`: `[n_devices, ..., K]`, in mesh order; limited on each of these."""
    n_devices = int(np.prod(list(axes.values())))
    if len(jax.devices()) < n_devices:
        pytest.skip(f"needs {n_devices} devices, found {len(jax.devices())}")
    devices = np.array(jax.devices()[:n_devices]).reshape(*axes.values())
    mesh = jax.sharding.Mesh(devices, tuple(axes))
    spec = jax.P(tuple(axes))

    def body(ids):
        return jax_ep.limit_choices(ids[0], E, capacity, axis_name=over)[None]

    return wrap(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))(ids)


@pytest.mark.xla_collectives
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("capacity", [0, 1, 7, 20, 1000, 2**33])
@pytest.mark.parametrize("shape", [(10, 3), (2, 5, 4), (0, 2)])
def test_a_capacity_may_count_over_all_ranks(shape, capacity):
    ids = make_ids((4, *shape))
    kept = limit_over_ranks({"ep": 4}, "ep", ids, capacity)
    np.testing.assert_array_equal(kept, keep_first_of_ranks(ids, capacity))


@pytest.mark.xla_collectives
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("over", [("x", "y"), ["x", "y"], ("y", "x"), "dp", ("dp", "x", "y"), ()])
def test_ranks_are_counted_in_the_order_of_their_axes(over):
    """Each group of ranks, at one index of the other axes, has a capacity of its own."""
    axes, names = {"dp": 2, "x": 2, "y": 2}, ("dp", "x", "y")
    ids = make_ids((8, 9, 2))
    kept = limit_over_ranks(axes, over, ids, 5)
    counted = (over,) if isinstance(over, str) else over
    order = [name for name in names if name not in counted] + list(counted)
    permutation = [names.index(name) for name in order]
    by_axes = ids.reshape(2, 2, 2, 9, 2).transpose(*permutation, 3, 4)
    groups = by_axes.reshape(-1, 2 ** len(counted), 9, 2)
    wanted = np.stack([keep_first_of_ranks(each, 5) for each in groups]).reshape(by_axes.shape)
    wanted = wanted.transpose(*np.argsort(permutation), 3, 4).reshape(ids.shape)
    np.testing.assert_array_equal(kept, wanted)


@pytest.mark.xla_collectives
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("n_nodes", [1, 2])
def test_an_expert_gets_no_more_rows_than_the_capacity(n_nodes, transport):
    """So a group needs room for that of its experts only."""
    case = cases.SMALL[4].replace(routing="zipf", n_nodes=n_nodes)
    group, inputs = group_of(case, transport), suite.make_inputs(case)

    def body(tokens, topk_ids):
        kept = jax_ep.limit_choices(topk_ids, case.n_experts, 5, axis_name="ep")
        return jax_ep.dispatch(group, tokens, kept).expert_counts.sum(axis=0)

    ids = np.stack(inputs.topk_ids)
    wanted = [min(5, int(np.sum(ids == e))) for e in range(case.n_experts)]
    assert max(np.sum(ids == e) for e in range(case.n_experts)) > 5
    out = on_mesh(group.mesh, body)(*put(group.mesh, inputs.tokens, inputs.topk_ids))
    for _, (counts,) in shards(group.mesh, (out,)):
        np.testing.assert_array_equal(counts, wanted)


@pytest.mark.parametrize("axis_name", [None, "ep", ("ep", [])], ids=str)
def test_other_axes_are_refused(axis_name):
    with pytest.raises(ValueError, match="limit_choices: axis_name must be an axis, or a tuple of"):
        jax_ep.limit_choices(make_ids((4, 2)), E, 3, axis_name=axis_name)


def test_choices_of_all_ranks_must_fit_in_int32():
    """Otherwise counts would be wrong."""
    ids = jax.ShapeDtypeStruct((4, 2**28, 2), jnp.int32)
    with pytest.raises(ValueError, match=r"all ranks along axis_name='ep' must fit .* 2147483648"):
        limit_over_ranks({"ep": 4}, "ep", ids, 3, lambda f: lambda ids: jax.eval_shape(f, ids))
