"""`count_choices`, `limit_choices` and `Dispatched.expert_counts`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jax_ep
import suite
from harness import group_of, on_mesh, put, shards

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
@pytest.mark.parametrize("shape", [(40, 3), (2, 5, 4), (0, 2)])
def test_the_first_choices_of_each_expert_are_kept(shape, capacity):
    ids = make_ids(shape)
    kept = jax.jit(lambda ids: jax_ep.limit_choices(ids, E, capacity))(ids)
    np.testing.assert_array_equal(kept, keep_first(ids, capacity))
    assert int(jax_ep.count_choices(kept, E).max(initial=0)) <= capacity


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
