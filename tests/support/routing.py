"""Seeded routings: int32[R, T, K] expert ids of all ranks, by name in `ROUTINGS`.

Every function takes (rng, n_ranks, n_tokens, n_experts, top_k). Where K choices would name an
expert twice, the remaining ones are -1.
"""

import numpy as np

Rng = np.random.Generator


def _distinct(scores: np.ndarray, top_k: int) -> np.ndarray:
    """The `top_k` experts with the highest scores for each token, without duplicates.

    Experts with a score of -inf are never chosen.
    """
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :top_k]
    chosen = np.take_along_axis(scores, order, -1)
    ids = np.where(np.isneginf(chosen), -1, order).astype(np.int32)
    missing = top_k - ids.shape[-1]
    return np.pad(ids, [(0, 0), (0, 0), (0, max(0, missing))], constant_values=-1)


def _among(rng: Rng, shape: tuple, experts, top_k: int) -> np.ndarray:
    """Distinct choices, uniform among the ids in `experts`."""
    scores = np.full(shape, -np.inf)
    scores[..., experts] = rng.random((*shape[:2], len(experts)))
    return _distinct(scores, top_k)


def uniform(rng: Rng, n_ranks, n_tokens, n_experts, top_k):
    """Every expert is equally likely; no duplicates."""
    return _among(rng, (n_ranks, n_tokens, n_experts), np.arange(n_experts), top_k)


def zipf(rng: Rng, n_ranks, n_tokens, n_experts, top_k):
    """Expert i of a shuffled order has weight 1 / (i + 1); no duplicates."""
    log_weight = -np.log(1.0 + rng.permutation(n_experts))
    gumbel = rng.gumbel(size=(n_ranks, n_tokens, n_experts))
    return _distinct(gumbel + log_weight, top_k)


def one_expert(rng: Rng, n_ranks, n_tokens, n_experts, top_k):
    """All tokens of all ranks choose the same expert, once, as the same choice."""
    ids = np.full((n_ranks, n_tokens, top_k), -1, np.int32)
    ids[..., rng.integers(top_k)] = rng.integers(n_experts)
    return ids


def one_rank(rng: Rng, n_ranks, n_tokens, n_experts, top_k):
    """All choices are experts of one rank: the worst case without duplicates."""
    n_local = n_experts // n_ranks
    experts = rng.integers(n_ranks) * n_local + np.arange(n_local)
    return _among(rng, (n_ranks, n_tokens, n_experts), experts, top_k)


def empty_experts(rng: Rng, n_ranks, n_tokens, n_experts, top_k):
    """Every second expert gets no token."""
    odd = np.arange(1, n_experts, 2) if n_experts > 1 else np.arange(n_experts)
    return _among(rng, (n_ranks, n_tokens, n_experts), odd, top_k)


def with_minus_one(rng: Rng, n_ranks, n_tokens, n_experts, top_k):
    """Three in ten choices are -1, at any position."""
    ids = uniform(rng, n_ranks, n_tokens, n_experts, top_k)
    return np.where(rng.random(ids.shape) < 0.3, -1, ids).astype(np.int32)


def out_of_range(rng: Rng, n_ranks, n_tokens, n_experts, top_k):
    """Three in ten choices are ids of no expert."""
    ids = uniform(rng, n_ranks, n_tokens, n_experts, top_k)
    limits = np.iinfo(np.int32)
    wrong = [-2, n_experts, n_experts + 7, limits.min, limits.max]
    wrong = rng.choice(wrong, ids.shape)
    return np.where(rng.random(ids.shape) < 0.3, wrong, ids).astype(np.int32)


def duplicates(rng: Rng, n_ranks, n_tokens, n_experts, top_k):
    """Choices are drawn with replacement from a few experts, so many repeat."""
    few = rng.choice(n_experts, min(n_experts, max(2, top_k // 2)), replace=False)
    return rng.choice(few, (n_ranks, n_tokens, top_k)).astype(np.int32)


def one_expert_k_times(rng: Rng, n_ranks, n_tokens, n_experts, top_k):
    """All K choices of all tokens name one expert: more rows than C where K > L."""
    shape = (n_ranks, n_tokens, top_k)
    return np.full(shape, rng.integers(n_experts), np.int32)


def nothing(rng: Rng, n_ranks, n_tokens, n_experts, top_k):
    """No token chooses an expert."""
    return np.full((n_ranks, n_tokens, top_k), -1, np.int32)


def ragged(rng: Rng, n_ranks, n_tokens, n_experts, top_k):
    """Each rank has its own number of tokens; the first has none, the last has all."""
    ids = uniform(rng, n_ranks, n_tokens, n_experts, top_k)
    count = rng.integers(0, n_tokens + 1, n_ranks)
    count[0], count[-1] = 0, n_tokens
    masked = np.arange(n_tokens) >= count[:, None]
    return np.where(masked[..., None], -1, ids).astype(np.int32)


def one_source(rng: Rng, n_ranks, n_tokens, n_experts, top_k):
    """Only one rank has tokens to send."""
    ids = uniform(rng, n_ranks, n_tokens, n_experts, top_k)
    sends = np.arange(n_ranks) == rng.integers(n_ranks)
    return np.where(sends[:, None, None], ids, -1).astype(np.int32)


ROUTINGS = {
    routing.__name__: routing
    for routing in (
        uniform,
        zipf,
        one_expert,
        one_rank,
        empty_experts,
        with_minus_one,
        out_of_range,
        duplicates,
        one_expert_k_times,
        nothing,
        ragged,
        one_source,
    )
}


def make(name: str, seed: int, n_ranks, n_tokens, n_experts, top_k) -> np.ndarray:
    """int32[R, T, K], a function of the arguments alone."""
    rng = np.random.default_rng([seed, n_ranks, n_tokens, n_experts, top_k])
    return ROUTINGS[name](rng, n_ranks, n_tokens, n_experts, top_k)
