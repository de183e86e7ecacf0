"""Balance in each call: plans, choices and rows against the oracle; how many copies it takes."""

import functools

import jax
import numpy as np
import pytest

import cases
import jax_ep
import oracle_balance as oracle
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
        for _ in range(25):
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
    loads, quota = counts.reshape(n_ranks, -1).sum(1), oracle.quota_of(counts, n_ranks)
    assert np.all(rows.sum(1) <= np.maximum(loads, quota))
    moved = rows[homes != np.arange(n_ranks)[:, None]].sum()
    surplus = np.maximum(loads - quota, 0).sum()
    assert moved <= surplus
    if is_enough:
        assert moved == surplus
        assert rows.sum(1).max() <= quota
        n_cut = (loads < quota).sum()  # pieces that end with the room of a rank
        assert (copies >= 0).sum() <= len(oracle.give(counts, n_ranks)) + n_cut


@pytest.mark.thorough
@pytest.mark.parametrize("n_ranks", [4, 8, 16])
def test_four_copies_suffice_for_popularity_by_zipf_s_law(n_ranks):
    """And nothing travels where routing is uniform, on up to 8 ranks of 4096 tokens each."""
    for n_experts, top_k in ((128, 8), (256, 8)):
        for exponent in (0.0, 0.8, 1.0, 1.2):
            popularity = np.arange(1, n_experts + 1.0) ** -exponent
            for seed in range(10):
                rng = np.random.default_rng(seed)
                keys = np.log(rng.permutation(popularity)) + rng.gumbel(size=(4096, n_experts))
                ids = np.argpartition(-keys, top_k - 1, axis=1)[:, :top_k]
                counts = n_ranks * np.bincount(ids.reshape(-1), minlength=n_experts)
                copies, rows = oracle.plan(counts, n_ranks, 4)
                assert rows.sum(1).max() <= oracle.quota_of(counts, n_ranks)
                assert exponent > 0 or n_ranks > 8 or copies.max() < 0


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
