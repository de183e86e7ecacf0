"""Expert placements in NumPy: which copy a choice goes to, what copies hold, what gradients sum.

Written apart from `jax_ep/placement`, one choice and one expert after the other.
"""

import numpy as np


def copies_of(placement: np.ndarray, expert: int, n_ranks: int, mask=None) -> list[int]:
    """The physical experts that are copies of a logical one, ascending; of unmasked ranks only."""
    n_local = len(placement) // n_ranks
    return [
        physical
        for physical, logical in enumerate(placement)
        if logical == expert and (mask is None or mask[physical // n_local])
    ]


def first_turn(rank: int, expert: int, n_copies: int) -> int:
    """Which copy comes first: a multiple of the golden ratio, modulo 1, as a fraction of them."""
    number = rank * 0x9E3779B9 + int(expert) * 0x85EBCA6B
    return (number % 2**32 // 2**16) * n_copies // 2**16


def place(
    ids: np.ndarray, placement: np.ndarray, *, mask=None, local_first=False, n_nodes=1
) -> tuple[np.ndarray, np.ndarray]:
    """Physical ids of `[R, T, K]` logical ones, and how many choices of each rank have no copy."""
    n_ranks = len(ids)
    n_local, per_node = len(placement) // n_ranks, n_ranks // n_nodes
    all_copies = [copies_of(placement, e, n_ranks, mask) for e in range(max(placement) + 1)]
    placed, unserved = ids.copy(), np.zeros(n_ranks, int)
    turns = np.zeros((n_ranks, len(all_copies)), int)
    for (rank, token, k), expert in np.ndenumerate(ids):
        if not 0 <= expert < len(all_copies):
            placed[rank, token, k] = -1 if expert == -1 else len(placement)
            continue
        copies = all_copies[expert]
        if local_first:
            own = [p for p in copies if p // n_local == rank]
            near = [p for p in copies if p // n_local // per_node == rank // per_node]
            copies = own or near or copies
        unserved[rank] += not copies
        turn = copies and first_turn(rank, expert, len(copies)) + turns[rank, expert]
        placed[rank, token, k] = copies[turn % len(copies)] if copies else -1
        turns[rank, expert] += 1
    return placed, unserved


def replicate(weights: np.ndarray, placement: np.ndarray) -> np.ndarray:
    """`[P, ...]` of `[E, ...]`."""
    return weights[placement]


def sum_copies(gradients: np.ndarray, placement: np.ndarray) -> np.ndarray:
    """`[E, ...]` of `[P, ...]`: in ascending order, in float32, rounded once."""
    n_experts = max(placement) + 1
    totals = np.zeros((n_experts, *gradients.shape[1:]), np.float32)
    for physical, logical in enumerate(placement):
        totals[logical] += gradients[physical].astype(np.float32)
    return totals.astype(gradients.dtype)


def imbalance(load_by_rank: np.ndarray) -> float:
    """How far the busiest rank is above the mean, as a fraction of it."""
    return load_by_rank.max() / load_by_rank.mean() - 1


def zipf_choices(seed: int, n_tokens: int, n_experts: int, top_k: int, exponent: float):
    """`[T, K]`: different experts of each token, drawn by Zipf's law, in a random order of ids."""
    rng = np.random.default_rng(seed)
    popularity = np.random.default_rng(1).permutation(np.arange(1, n_experts + 1.0) ** -exponent)
    keys = np.log(popularity) + rng.gumbel(size=(n_tokens, n_experts))
    return np.argsort(-keys, axis=1)[:, :top_k].astype(np.int32)
