"""What is measured: sizes, routings, capacities; and the inputs made from them."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import ml_dtypes
import numpy as np

N_RANKS, N_EXPERTS, TOP_K = 8, 64, 8

#: The contestant that all others are compared with.
OURS = "host"

#: Operations, in the order of the table.
OPERATIONS = ("dispatch", "combine", "round trip", "round trip + grad")


@dataclasses.dataclass(frozen=True)
class Case:
    """One set of inputs; every contestant runs every operation on it.

    Attributes:
        n_tokens: T, of each rank.
        hidden_size: H.
        routing: a name in `ROUTINGS`.
        capacity: rows per rank as a multiple of the mean T * K, or None for the worst
            case, R * T * min(K, L).
        dtype: of tokens and results.
        allocator: `"default"`: as users have it, large arrays are mapped anew in each
            call, and a page that is never written costs nothing. `"keep"`: freed memory
            stays mapped, which helps those who write all C rows.
    """

    n_tokens: int
    hidden_size: int
    routing: str = "uniform"
    capacity: float | None = None
    dtype: str = "bfloat16"
    allocator: str = "default"

    n_ranks: ClassVar[int] = N_RANKS
    n_experts: ClassVar[int] = N_EXPERTS
    top_k: ClassVar[int] = TOP_K

    @property
    def name(self) -> str:
        """Unique among `CASES`; what `--only` matches."""
        parts = [f"T{self.n_tokens}", f"H{self.hidden_size}", self.routing]
        parts += [f"capacity{self.capacity:g}x"] if self.capacity else []
        parts += [self.dtype] if self.dtype != "bfloat16" else []
        parts += ["keep"] if self.allocator == "keep" else []
        return "-".join(parts)

    @property
    def n_rows(self) -> int:
        """C, the rows of one rank's output."""
        worst = N_RANKS * self.n_tokens * min(TOP_K, N_EXPERTS // N_RANKS)
        if self.capacity is None:
            return worst
        return min(worst, int(self.capacity * self.n_tokens * TOP_K))


MAIN_CASES = tuple(Case(t, h) for t in (16, 256, 2048) for h in (256, 1024))

KEEP_CASES = tuple(dataclasses.replace(case, allocator="keep") for case in MAIN_CASES)

VARIANT_CASES = (
    Case(256, 1024, dtype="float32"),
    Case(2048, 256, routing="zipf"),
    Case(2048, 256, routing="half_empty"),
    Case(2048, 256, routing="one_rank"),
    Case(2048, 256, capacity=2.0),
    Case(2048, 1024, capacity=2.0),
    Case(2048, 1024, capacity=2.0, allocator="keep"),
)

CASES = MAIN_CASES + KEEP_CASES + VARIANT_CASES

QUICK_CASES = (Case(16, 256), Case(64, 128, routing="zipf", capacity=4.0))


def _uniform(rng: np.random.Generator, shape: tuple) -> np.ndarray:
    """Every expert is equally likely."""
    return rng.random(shape)


def _zipf(rng: np.random.Generator, shape: tuple) -> np.ndarray:
    """The i-th of the shuffled experts has weight 1 / i."""
    return rng.gumbel(size=shape) - np.log(1 + rng.permutation(shape[-1]))


def _half_empty(rng: np.random.Generator, shape: tuple) -> np.ndarray:
    """Uniform, but each rank has its own number of tokens: T / 2 in the mean."""
    count = rng.integers(0, shape[1] + 1, shape[0])
    is_token = np.arange(shape[1]) < count[:, None]
    return np.where(is_token[..., None], rng.random(shape), -np.inf)


def _one_rank(rng: np.random.Generator, shape: tuple) -> np.ndarray:
    """All choices fall on one rank: it fills all C rows, the others none."""
    here = np.arange(shape[-1]) // (shape[-1] // N_RANKS) == rng.integers(N_RANKS)
    return np.where(here, rng.random(shape), -np.inf)


#: Scores `[R, T, E]`; a token chooses its K best experts, none with a score of -inf.
ROUTINGS = {
    "uniform": _uniform,
    "zipf": _zipf,
    "half_empty": _half_empty,
    "one_rank": _one_rank,
}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arrays of all ranks, as NumPy; the first axis is R * T."""

    tokens: np.ndarray  # [R * T, H]
    topk_ids: np.ndarray  # int32[R * T, K]
    topk_weights: np.ndarray  # float32[R * T, K]
    cotangents: np.ndarray  # [R * T, H], of combine's result


def numpy_dtype(case: Case) -> np.dtype:
    """The case's dtype, bfloat16 included."""
    return np.dtype(getattr(ml_dtypes, case.dtype, case.dtype))


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Random tokens, weights and routing; a function of the arguments alone."""
    rng = np.random.default_rng([seed, case.n_tokens, case.hidden_size])
    scores = ROUTINGS[case.routing](rng, (N_RANKS, case.n_tokens, N_EXPERTS))
    best = np.argsort(-scores, axis=-1, kind="stable")[..., :TOP_K]
    chosen = np.take_along_axis(scores, best, -1)
    ids = np.where(np.isneginf(chosen), -1, best).astype(np.int32).reshape(-1, TOP_K)
    rows = (len(ids), case.hidden_size)
    weights = rng.random(ids.shape, np.float32)
    return Inputs(
        tokens=rng.standard_normal(rows, np.float32).astype(numpy_dtype(case)),
        topk_ids=ids,
        topk_weights=weights / weights.sum(-1, keepdims=True),
        cotangents=rng.standard_normal(rows, np.float32).astype(numpy_dtype(case)),
    )
