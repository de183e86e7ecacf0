"""A case: sizes, capacity, token format, and a routing of tokens to experts."""

import dataclasses
from fractions import Fraction

import numpy as np

import jax_ep
from jax_ep.formats import FORMATS, QUANTIZED

# With few tokens, a capacity leaves room for this many rows above the mean.
_SPARE_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Case:
    """One set of inputs; every implementation gets the same."""

    n_tokens: int  # per rank (T)
    hidden_size: int  # H
    n_experts: int  # over all ranks (E)
    top_k: int  # K
    routing: str = "uniform"  # in `ROUTINGS`
    capacity: float | None = None  # C / (T * K), the mean; None: the worst case
    token_format: str = "bf16"  # in `jax_ep.formats.FORMATS`
    n_sms: int | None = None  # multiprocessors per call; None: the package's default
    width: int = 0  # of the dense layer that overlaps with calls; 0: no layer
    expert_size: int = 0  # F of a layer's experts; 0: no experts
    n_ranks: int = 0  # R; 0 until the devices are known

    @property
    def name(self) -> str:
        """Name of the case in results; items and `--only` use it."""
        parts = [f"T{self.n_tokens}", f"H{self.hidden_size}", self.routing]
        parts += [f"{self.capacity:g}x"] if self.capacity else []
        parts += [self.token_format] if self.token_format != "bf16" else []
        parts += [f"E{self.n_experts}-F{self.expert_size}"] if self.expert_size else []
        parts += [f"{self.n_sms or 'all'}sms-width{self.width}"] if self.width else []
        return "-".join(parts)

    @property
    def n_rows(self) -> int:
        """Rows of one rank's output (C), without padding."""
        n_local = self.n_experts // self.n_ranks
        worst = self.n_ranks * self.n_tokens * min(self.top_k, n_local)
        if self.capacity is None:
            return worst
        mean = self.n_tokens * self.top_k
        return min(worst, max(int(Fraction(str(self.capacity)) * mean), mean + _SPARE_ROWS))

    @property
    def is_quantized(self) -> bool:
        """Whether the format quantizes: rows are close, not equal, to the tokens."""
        return self.token_format in QUANTIZED

    @property
    def dtype(self) -> str:
        """Dtype of tokens and of sums."""
        return "float32" if self.token_format == "f32" else "bfloat16"

    @property
    def token_bytes(self) -> int:
        """Bytes of a token on the wire: payload and scales."""
        return FORMATS[self.token_format]().token_bytes(self.hidden_size)

    def config(self) -> jax_ep.EPConfig:
        """The package's config; its capacity also has room for padding rows."""
        token_format = FORMATS[self.token_format]()
        alignment = token_format.layout.row_alignment
        n_rows = self.n_rows + (alignment - 1) * self.n_experts // self.n_ranks
        is_worst = self.n_rows == dataclasses.replace(self, capacity=None).n_rows
        return jax_ep.EPConfig(
            n_experts=self.n_experts,
            top_k=self.top_k,
            hidden_size=self.hidden_size,
            max_tokens_per_rank=self.n_tokens,
            token_format=token_format,
            combine_dtype=np.dtype(self.dtype),
            recv_capacity=None if is_worst else n_rows // alignment * alignment,
            n_sms=self.n_sms,
        )


def _uniform(rng: np.random.Generator, shape: tuple) -> np.ndarray:
    """Every expert is equally likely."""
    return rng.random(shape, np.float32)


def _zipf(rng: np.random.Generator, shape: tuple) -> np.ndarray:
    """The i-th of the shuffled experts has weight 1 / i; always the same shuffle."""
    rank = np.random.default_rng(1).permutation(shape[-1])
    return rng.gumbel(size=shape) - np.log(1 + rank)


def _skewed(rng: np.random.Generator, shape: tuple) -> np.ndarray:
    """Expert i has weight (i + 1)^-0.6, so that the first of 4 ranks gets twice the mean."""
    return rng.gumbel(size=shape) - 0.6 * np.log(np.arange(1, shape[-1] + 1.0))


def _half_empty(rng: np.random.Generator, shape: tuple) -> np.ndarray:
    """Uniform, but ranks have different numbers of tokens: T / 2 on average."""
    count = rng.integers(0, shape[1] + 1, shape[0])
    is_token = np.arange(shape[1]) < count[:, None]
    return np.where(is_token[..., None], rng.random(shape), -np.inf)


def _one_rank(rng: np.random.Generator, shape: tuple) -> np.ndarray:
    """All choices are experts of one rank, which then fills its C rows."""
    here = np.arange(shape[-1]) // (shape[-1] // shape[0]) == rng.integers(shape[0])
    return np.where(here, rng.random(shape), -np.inf)


# Functions that return scores `[R, T, E]`. A token chooses the K experts with the highest scores,
# but none with a score of -inf.
ROUTINGS = {
    "uniform": _uniform,
    "zipf": _zipf,
    "skewed": _skewed,
    "half_empty": _half_empty,
    "one_rank": _one_rank,
}


def make_routing(case: Case, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """`int32[R * T, K]` ids, no expert twice in one token, and `float32` weights.

    A token's weights sum to about 1, so that a chain of round trips neither grows nor
    vanishes, but not to exactly 1: a sum that lacks them would show.
    """
    rng = np.random.default_rng([seed, case.n_tokens, case.hidden_size])
    shape = (case.n_ranks, case.n_tokens, case.n_experts)
    scores = ROUTINGS[case.routing](rng, shape).reshape(-1, case.n_experts)
    best = np.argpartition(scores, -case.top_k, axis=-1)[:, -case.top_k :]
    chosen = np.take_along_axis(scores, best, -1)
    ids = np.where(np.isneginf(chosen), -1, best).astype(np.int32)
    weights = (rng.random(ids.shape, np.float32) + np.float32(0.5)) / case.top_k
    return ids, weights


def remote_messages(case: Case, topk_ids: np.ndarray) -> float:
    """Messages to other ranks, one per (token, rank); the mean over ranks."""
    rank = np.where(topk_ids < 0, -1, topk_ids // (case.n_experts // case.n_ranks))
    goes = (rank[:, :, None] == np.arange(case.n_ranks)).any(axis=1)
    source = np.arange(len(goes)) // case.n_tokens
    return float(goes.sum() - goes[np.arange(len(goes)), source].sum()) / case.n_ranks
