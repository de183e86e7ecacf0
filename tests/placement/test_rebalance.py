"""`rebalance`: placements of few steps' loads, for the rows that later steps bring."""

import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest

import balance_tables
import jax_ep
import oracle_placement as oracle

R, T, K = 8, 512, 8


def rows_by_rank(ids, logical):
    """Rows of each rank, `[R, T, K]` choices placed one after the other by the package's rule."""
    placed, _ = oracle.place(ids, logical)
    return np.bincount(placed.reshape(-1) * R // len(logical), minlength=R)


@pytest.mark.parametrize("home_slack", [0.0, 0.1])
@pytest.mark.parametrize("exponent", [1.0, 1.1, 1.2])
@pytest.mark.parametrize("n_experts", [128, 256])
def test_sampled_rows_of_later_steps_are_balanced(n_experts, exponent, home_slack):
    """By Zipf's law: the busiest rank has at most 15 % more than the mean, instead of 40 to 140."""
    ids = oracle.zipf_choices(0, 2 * R * T, n_experts, K, exponent)
    seen, later = ids[: R * T], ids[R * T :].reshape(R, T, K)
    load = np.bincount(seen.reshape(-1), minlength=n_experts)
    logical = jax_ep.rebalance(load, R, n_experts // R, home_slack=home_slack)
    assert len(logical) == n_experts + n_experts // R
    before = oracle.imbalance(rows_by_rank(later, np.arange(n_experts)))
    after = oracle.imbalance(rows_by_rank(later, logical))
    np.testing.assert_array_equal(
        balance_tables.rows_by_rank(later, logical), rows_by_rank(later, logical)
    )
    assert before > 0.3
    assert after < (0.05 if home_slack == 0 else 0.1), (before, after)


def moves(logical, n_ranks):
    """Physical experts away from home."""
    n_experts = max(logical) + 1
    ranks = np.arange(len(logical)) * n_ranks // len(logical)
    return np.sum(logical * n_ranks // n_experts != ranks)


def test_slack_keeps_experts_at_home():
    ids = oracle.zipf_choices(0, 4096, 256, K, 1.1)
    load = np.bincount(ids.reshape(-1), minlength=256)
    none, some = (jax_ep.rebalance(load, R, 32, home_slack=slack) for slack in (0, 0.1))
    assert moves(none, R) > 200
    assert moves(some, R) < 75
    np.testing.assert_array_equal(jax_ep.rebalance(np.ones(256), R, 0), np.arange(256))


def test_an_example_by_hand():
    """Expert 0 gets a second copy, then expert 1, as there are two ranks: 45, 45, 10, 10, 9, 8."""
    logical = jax_ep.rebalance([90, 20, 9, 8], 2, 2, home_slack=0)
    # Both ranks have 55 when expert 2 comes, so it goes home, to rank 1.
    np.testing.assert_array_equal(logical, [0, 1, 3, 0, 1, 2])
    assert logical.dtype == np.int32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "uint8"])
def test_loads_may_have_any_dtype_of_real_numbers(dtype):
    load = jnp.array([90, 20, 9, 8], dtype)
    np.testing.assert_array_equal(jax_ep.rebalance(load, 2, 2, home_slack=0), [0, 1, 3, 0, 1, 2])


def test_loads_of_steps_add_up():
    steps = np.array([[9, 0, 1, 1], [0, 5, 1, 1]], np.int64)
    np.testing.assert_array_equal(
        jax_ep.rebalance(steps, 2, 2), jax_ep.rebalance([9, 5, 2, 2], 2, 2)
    )


@pytest.mark.parametrize("n_groups", [None, 4])
def test_copies_of_an_expert_are_on_one_node_and_groups_stay_together(n_groups):
    ids = oracle.zipf_choices(0, 4096, 64, K, 1.2)
    load = np.bincount(ids.reshape(-1), minlength=64)
    logical = jax_ep.rebalance(load, R, 16, n_nodes=2, n_expert_groups=n_groups)
    nodes = [set(half.tolist()) for half in logical.reshape(2, -1)]
    assert not nodes[0] & nodes[1]
    assert len(nodes[0]) == len(nodes[1]) == 32
    if n_groups:
        assert len({expert // 16 for expert in nodes[0]}) == 2
    counts = np.bincount(logical)
    assert counts.max() <= 4
    shares = (load / counts)[logical].reshape(R, -1).sum(1)
    assert oracle.imbalance(shares) < 0.1 or n_groups  # groups may be uneven


def random_sizes(rng):
    n_ranks, n_home = int(rng.choice([1, 2, 3, 4, 6, 8])), int(rng.integers(1, 5))
    n_nodes = int(rng.choice([n for n in range(1, n_ranks + 1) if n_ranks % n == 0]))
    most = n_ranks * n_home // n_nodes - n_home
    return n_ranks, n_home * n_ranks, n_nodes, n_ranks * int(rng.integers(0, most + 1))


def test_any_sizes_give_a_placement():
    """Each expert at least once, at most once on a rank; also where room is found by a move."""
    rng = np.random.default_rng(0)
    for _ in range(400):
        n_ranks, n_experts, n_nodes, n_redundant = random_sizes(rng)
        load = rng.integers(0, 4, n_experts) * rng.integers(0, 100, n_experts)
        slack = float(rng.choice([0, 0.1, 1]))
        logical = jax_ep.rebalance(load, n_ranks, n_redundant, n_nodes=n_nodes, home_slack=slack)
        assert len(logical) == n_experts + n_redundant
        assert set(logical.tolist()) == set(range(n_experts))
        for held in logical.reshape(n_ranks, -1):
            assert (np.diff(held) > 0).all()  # different, ascending


def test_the_load_of_physical_experts_is_that_of_logical_ones():
    placement = jax_ep.ExpertPlacement([0, 1, 2, 0, 3, 1], 2)
    load = np.array([[10, 20, 30, 1, 40, 2], [1, 1, 1, 1, 1, 1]], np.int64)
    logical = placement.logical_load(load)
    assert logical.dtype == np.int64
    np.testing.assert_array_equal(logical, [[11, 22, 30, 40], [2, 2, 1, 1]])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "row,measure",
    [
        ("256, 1.0", lambda: balance_tables.placements(256, 1.0)[[0, 1, 3, 5]]),
        ("128", lambda: balance_tables.rules(128)),
    ],
)
def test_the_tables_of_the_page_show_what_is_measured(row, measure):
    """Percentages, up to a tenth, as other versions of NumPy may draw other numbers."""
    page = (pathlib.Path(__file__).parents[2] / "docs" / "balance.md").read_text()
    (cells,) = re.findall(rf"^\| {row} \|(.*)\|$", page, re.MULTILINE)
    shown = [float(number) for number in re.findall(r"([\d.]+) %", cells)]
    np.testing.assert_allclose(shown, 100 * measure(), rtol=0.1)
