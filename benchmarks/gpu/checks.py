"""Every contestant's results against NumPy, before it is timed.

All of `row_offsets`, `src_info` and the counts; rows in bits and sums to a few
roundings, of a sample where there are many.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import numpy_truth
from gpu.cases import Case, Inputs

_SAMPLE = 2048  # rows, tokens of one rank


class Checker:
    """What one case must give."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self._case, self._inputs = case, inputs
        self._truth = numpy_truth.layout(case, inputs)
        if self._truth.n_dropped.any():
            raise ValueError(
                f"The capacity must hold all rows; {self._truth.n_dropped} are dropped."
            )
        rng = np.random.default_rng(3)
        most = min(_SAMPLE, case.n_rows)
        self._rows = np.stack(
            [_sample(rng, len(choices), most) for choices in self._truth.choices]
        )
        most = min(_SAMPLE, case.n_tokens)
        self._tokens = np.stack(
            [_sample(rng, case.n_tokens, most) for _ in range(case.n_ranks)]
        )

    @property
    def sample(self) -> np.ndarray:
        """Rows that `check_dispatch` wants to see, `int32[R, S]`."""
        return self._rows

    def check_dispatch(self, name: str, dispatched: Any, sampled: jax.Array) -> None:
        """`sampled` is `[R, S, H]`: the rows of `sample`."""
        case, truth = self._case, self._truth
        numpy_truth.check_counts(name, truth, dispatched)
        for rank, choices in enumerate(truth.choices):
            numpy_truth.check_src_info(name, case, choices, rank, dispatched)
            if not len(choices):
                continue
            tokens = choices[self._rows[rank]] // case.top_k
            numpy_truth.require(
                name,
                "rows",
                numpy_truth.shard(sampled, rank).view(np.uint16),
                self._inputs.tokens[tokens].view(np.uint16),
            )

    def check_combine(self, name: str, out: jax.Array) -> None:
        """Of what `programs.examine` gives."""
        for rank, shard in enumerate(out.addressable_shards):
            token = rank * self._case.n_tokens + self._tokens[rank]
            weights = self._inputs.topk_weights[token] * numpy_truth.expert_factor(
                self._inputs.topk_ids[token]
            )
            tokens = self._inputs.tokens[token].astype(np.float32)
            numpy_truth.require_close(
                name,
                "combine",
                np.asarray(shard.data)[self._tokens[rank]],
                weights.sum(1)[:, None] * tokens,
                self._case.top_k * 2.0**-9,
            )


def _sample(rng: np.random.Generator, n: int, size: int) -> np.ndarray:
    """`int32[size]`: all of n if they are fewer, the last one in any case."""
    if n <= size:
        return np.minimum(np.arange(size, dtype=np.int32), max(n - 1, 0))
    return np.append(rng.integers(0, n, size - 1, np.int32), np.int32(n - 1))
