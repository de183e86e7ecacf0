"""Exact balance: plans, choices and rows against the oracle; how equal the ranks' rows are."""

import functools

import jax
import numpy as np
import pytest

import cases
import jax_ep
import oracle_balance as oracle
import routing
import suite
from harness import AXIS, config_of, make_mesh, on_mesh, params, put, skip_if_xla_crashes
from jax_ep.exchange import balance

SMALL = cases.SMALL[4].replace(expert_copies=3)
CASES = [
    SMALL.replace(expert_copies=1, weights="row"),
    SMALL.replace(expert_copies=12, row_alignment=16, **cases.FLAGS["shared"]),
    SMALL.replace(recv_capacity=40, weights="none"),
    cases.SMALL[8].replace(n_nodes=2, expert_copies=2, weights="row"),
]
MORE_CASES = [
    *(cases.SMALL[n].replace(expert_copies=n, weights="row") for n in (1, 2, 8)),
    SMALL.replace(recv_capacity=10**6, expert_copies=1, weights="none"),
    SMALL.replace(n_tokens=0, max_tokens=8),
    SMALL.replace(n_tokens=5, max_tokens=8, combine_dtype="float32"),
    SMALL.replace(n_nodes=2, **cases.FLAGS["shared"]),
    cases.SMALL[8].replace(n_nodes=4, expert_copies=1, weights="none"),
    cases.SMALL[32].replace(expert_copies=2),  # L = 1
    *(cases.QUANTIZED_SMALL[name].replace(expert_copies=4) for name in cases.QUANTIZED_NAMES),
]


@pytest.mark.parametrize("case", params(CASES))
def test_every_routing_matches_the_oracle(case, transport):
    mesh = make_mesh(case.n_ranks)
    for each in cases.every_routing(case):
        suite.check(each, transport, mesh)


@pytest.mark.thorough
@pytest.mark.parametrize("case", params(MORE_CASES))
def test_more_shapes_and_all_formats_match_the_oracle(case, transport):
    skip_if_xla_crashes(case)
    mesh = make_mesh(case.n_ranks)
    for each in cases.every_routing(case):
        suite.check(each, transport, mesh)


def test_asynchronous_calls_match_the_oracle(transport):
    for name in ("zipf", "one_rank"):
        suite.check(SMALL.replace(routing=name), transport, make_mesh(4), is_async=True)


def test_each_replica_is_balanced_by_itself(transport):
    suite.check(SMALL.replace(routing="zipf"), transport, make_mesh(4, 2))


SIZES = [(1, 4), (2, 1), (3, 8), (4, 2), (4, 32), (8, 3), (64, 4)]  # R and L


def draw_counts(rng, n_experts: int) -> np.ndarray:
    """`int32[E]`: a few experts are popular, some get nothing, or there are many ties."""
    counts = rng.permutation(rng.zipf(1.1 + rng.random(), n_experts) % 5000)
    counts = counts * (rng.random(n_experts) < rng.choice((1.0, 0.5, 0.1)))
    return np.minimum(counts, rng.choice((2, 5000))).astype(np.int32)


@functools.cache
def planner(n_ranks: int, n_slots: int):
    return jax.jit(lambda counts: balance.make_plan(counts, n_ranks, n_slots, 1 << 20))


@pytest.mark.parametrize("n_slots", [1, 4, None], ids=["1", "4", "enough"])
def test_random_plans_are_those_of_the_oracle(n_slots):
    for n_ranks, n_local in SIZES:
        rng = np.random.default_rng([n_ranks, n_local])
        for _ in range(50):
            counts = draw_counts(rng, n_ranks * n_local)
            check_plan(counts, n_ranks, n_slots or n_local + n_ranks, n_slots is None)


def check_plan(counts: np.ndarray, n_ranks: int, n_slots: int, is_enough: bool) -> None:
    copies, rows, slots = map(np.asarray, planner(n_ranks, n_slots)(counts))
    wanted_copies, wanted_rows = oracle.plan(counts, n_ranks, n_slots)
    np.testing.assert_array_equal(copies, wanted_copies)
    np.testing.assert_array_equal(rows, wanted_rows)
    homes = np.arange(len(counts)) * n_ranks // len(counts)
    for rank, slot in np.argwhere(copies >= 0):
        assert slots[rank, copies[rank, slot]] == slot
        assert homes[copies[rank, slot]] != rank
    assert rows.min() >= 0
    np.testing.assert_array_equal(rows.sum(0), counts)
    loads, quota = counts.reshape(n_ranks, -1).sum(1), -(-counts.sum() // n_ranks)
    assert np.all(rows.sum(1) <= np.maximum(loads, quota))
    moved = rows[homes != np.arange(n_ranks)[:, None]].sum()
    surplus = np.maximum(loads - quota, 0).sum()
    assert moved <= surplus
    if is_enough:
        assert moved == surplus
        assert rows.sum(1).max() <= quota
        n_cut = (loads < quota).sum()  # pieces that end with the room of a rank
        assert (copies >= 0).sum() <= len(oracle.give(counts, n_ranks)) + n_cut


def test_ranks_get_equally_many_rows_in_a_simulation_of_64():
    n_ranks, n_experts, top_k, n_tokens = 64, 256, 8, 512
    ids = routing.make("zipf", 5, n_ranks, n_tokens, n_experts, top_k)
    counts = np.stack([np.bincount(each[each >= 0], minlength=n_experts) for each in ids])
    total = counts.sum(0).astype(np.int32)
    by_rank = total.reshape(n_ranks, -1).sum(1)
    assert by_rank.max() > 4 * by_rank.mean()
    copies, rows, _ = planner(n_ranks, 8)(total)
    assert np.asarray(rows).sum(1).max() <= -(-total.sum() // n_ranks)
    assert (np.asarray(copies) >= 0).sum(1).max() <= 8


def test_a_group_counts_rows_of_copies(transport):
    if transport == "xla":
        pytest.skip("xla counts nothing")
    case = SMALL.replace(routing="one_rank", expert_copies=8)
    group = jax_ep.ep_init(make_mesh(4), AXIS, config_of(case, name="counted"), transport)
    inputs = suite.make_inputs(case)
    mesh = make_mesh(4)
    tokens, ids = (put(mesh, np.stack(x)) for x in (inputs.tokens, inputs.topk_ids))
    sizes = on_mesh(mesh, lambda *x: jax_ep.dispatch(group, *x).group_sizes)(tokens, ids)
    sizes = np.asarray(sizes).reshape(4, -1)
    stats = group.stats()
    n_all = sum(one.rows_to_expert.sum() + one.rows_to_copies.sum() for one in stats)
    assert n_all == 4 * case.n_tokens * case.top_k
    for rank, one in enumerate(stats):
        np.testing.assert_array_equal(one.rows_per_expert, sizes[rank, :4])
        np.testing.assert_array_equal(one.rows_per_copy, sizes[rank, 4:])
    to_copies = sum(one.rows_to_copies for one in stats)
    np.testing.assert_array_equal(to_copies, sizes[:, 4:].sum(1))
    group.close()
