"""What the GPU benchmark measures: sizes, routings, capacities; and the inputs."""

from __future__ import annotations

import dataclasses
import functools

import ml_dtypes
import numpy as np

#: Whether rows of `recv_capacity` are fewer than the worst case, and by how much.
_LARGE = 512
_OF_MEAN = {"uniform": 1.5, "zipf": 3.0}

_SPREAD = 9973  # elements between the beginnings of two sets of tokens


@dataclasses.dataclass(frozen=True)
class Case:
    """One size and routing, on all devices.

    Attributes:
        n_ranks: R.
        n_tokens: T, of each rank.
        hidden_size: H.
        routing: `"uniform"`, or `"zipf"`: the i-th of the shuffled experts has
            weight 1 / i.
        n_experts: E, over all ranks.
        top_k: K.
    """

    n_ranks: int
    n_tokens: int
    hidden_size: int = 7168
    routing: str = "uniform"
    n_experts: int = 256
    top_k: int = 8

    @property
    def n_rows(self) -> int:
        """C: the worst case below 512 tokens, else a multiple of the mean T * K."""
        n_local = self.n_experts // self.n_ranks
        worst = self.n_ranks * self.n_tokens * min(self.top_k, n_local)
        if self.n_tokens < _LARGE:
            return worst
        return min(worst, int(_OF_MEAN[self.routing] * self.n_tokens * self.top_k))

    @property
    def row_bytes(self) -> int:
        """Of a token, in bfloat16."""
        return self.hidden_size * 2


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arrays of all ranks, as NumPy; the first axis is R * T."""

    tokens: np.ndarray  # bfloat16[R * T, H]
    topk_ids: np.ndarray  # int32[R * T, K]
    topk_weights: np.ndarray  # float32[R * T, K]


def make_inputs(case: Case, seed: int) -> Inputs:
    """Random tokens, weights that add up to 1, and routing, by seed."""
    rng = np.random.default_rng([seed, case.n_tokens])
    n = case.n_ranks * case.n_tokens
    ids = _choose(case, rng, n)
    weights = rng.random((n, case.top_k), np.float32)
    return Inputs(
        tokens=_tokens(case, seed, n),
        topk_ids=ids,
        topk_weights=weights / weights.sum(-1, keepdims=True),
    )


def traffic(case: Case, topk_ids: np.ndarray) -> dict[str, float]:
    """Means per rank: rows, and messages to other ranks, one per (token, rank)."""
    n_local = case.n_experts // case.n_ranks
    goes = np.zeros((len(topk_ids), case.n_ranks), bool)
    np.put_along_axis(goes, topk_ids // n_local, True, axis=1)
    source = np.arange(len(topk_ids)) // case.n_tokens
    goes[np.arange(len(goes)), source] = False
    rows = np.bincount((topk_ids // n_local).reshape(-1), minlength=case.n_ranks)
    return {
        "rows": topk_ids.size / case.n_ranks,
        "rows_of_fullest_rank": int(rows.max()),
        "remote_messages": float(goes.sum()) / case.n_ranks,
    }


def _choose(case: Case, rng: np.random.Generator, n: int) -> np.ndarray:
    shape = (n, case.n_experts)
    if case.routing == "zipf":
        rank = np.random.default_rng(1).permutation(case.n_experts)
        scores = rng.gumbel(size=shape) - np.log(1 + rank)
    else:
        scores = rng.random(shape, np.float32)
    best = np.argpartition(scores, -case.top_k, axis=-1)[:, -case.top_k :]
    return best.astype(np.int32)


def _tokens(case: Case, seed: int, n: int) -> np.ndarray:
    size, start = n * case.hidden_size, seed * _SPREAD
    return _pool(_round_up(size + start))[start : start + size].reshape(n, -1)


def _round_up(size: int) -> int:
    return 1 << (size - 1).bit_length()


@functools.lru_cache(maxsize=1)
def _pool(size: int) -> np.ndarray:
    """bfloat16 of random sign and mantissa, and size between 1/8 and 2."""
    bits = np.frombuffer(np.random.default_rng(7).bytes(2 * size), np.uint16)
    return ((bits & 0x81FF) | 0x3E00).view(ml_dtypes.bfloat16)
