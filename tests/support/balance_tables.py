"""The figures of docs/balance.md, from choices by Zipf's law.

Usage: python tests/support/balance_tables.py
"""

import numpy as np

import jax_ep
import oracle_placement as oracle

R, K = 8, 8


def copy_tables(logical):
    """The number of copies of each expert, the first of them in an order of copies, that order."""
    counts = np.bincount(logical)
    return counts, np.cumsum(counts) - counts, np.argsort(logical, kind="stable")


def rows_by_rank(ids, logical):
    """Of `[R, T, K]` choices, which take the copies of their expert in turn on each rank."""
    counts, first, order = copy_tables(logical)
    rows = np.zeros(R, int)
    for rank, of_rank in enumerate(ids):
        turns = [oracle.first_turn(rank, expert, n) for expert, n in enumerate(counts)]
        for expert in of_rank.reshape(-1):
            rows[order[first[expert] + turns[expert] % counts[expert]] * R // len(logical)] += 1
            turns[expert] += 1
    return rows


def rounds_of(logical):
    """The most experts of one home that have a copy elsewhere."""
    homes = logical * R // (max(logical) + 1)
    is_away = homes != np.arange(len(logical)) * R // len(logical)
    return max(len(set(logical[is_away & (homes == rank)])) for rank in range(R))


def placements(n_experts, exponent, n_draws=5):
    """A row of the first table: imbalance in order; then imbalance and rounds, three times."""
    options = {"home_slack": 0, "n_redundant": n_experts // R}, {"n_redundant": n_experts // R}
    figures = []
    for seed in range(n_draws):
        ids = oracle.zipf_choices(seed, 2 * 8192, n_experts, K, exponent)
        load = np.bincount(ids[:8192].reshape(-1), minlength=n_experts)
        later = ids[8192:].reshape(R, -1, K)
        figures.append([oracle.imbalance(rows_by_rank(later, np.arange(n_experts)))])
        for each in (*options, {"n_redundant": 0}):
            logical = jax_ep.rebalance(load, R, **each)
            figures[-1] += [oracle.imbalance(rows_by_rank(later, logical)), rounds_of(logical)]
    return np.mean(figures, axis=0)


def rules(n_tokens, n_draws=20):
    """A row of the second table: imbalance in order, and with copies."""
    past = oracle.zipf_choices(9, 65536, 256, K, 1.1)
    logical = jax_ep.rebalance(np.bincount(past.reshape(-1), minlength=256), R, 32, home_slack=0)
    figures = []
    for seed in range(100, 100 + n_draws):
        ids = oracle.zipf_choices(seed, R * n_tokens, 256, K, 1.1).reshape(R, n_tokens, K)
        rows = rows_by_rank(ids, np.arange(256)), rows_by_rank(ids, logical)
        figures.append([*map(oracle.imbalance, rows)])
    return np.mean(figures, axis=0)


if __name__ == "__main__":
    np.set_printoptions(precision=3, suppress=True)
    for n_experts in (128, 256):
        for exponent in (1.0, 1.2):
            print(n_experts, exponent, placements(n_experts, exponent))
    for n_tokens in (1, 4, 16, 128, 1024):
        print(n_tokens, rules(n_tokens))
