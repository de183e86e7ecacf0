"""Batches of tokens: a synthetic language, or the bytes of text files.

A batch depends on the seed and its step alone, so a resumed run sees those of an unbroken one.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Data(Protocol):
    """A source of batches."""

    def batch(self, step: int, n_sequences: int, sequence: int) -> NDArray[np.int32]:
        """Returns int32[n_sequences, sequence + 1]."""

    @property
    def entropy(self) -> float | None:
        """The lowest loss that any model can have, in nats per token, if it is known."""


@dataclasses.dataclass(frozen=True)
class MarkovChain:
    """A language whose next token is a function of the last one, or one drawn by Zipf's law.

    With probability `FOLLOW`, token t is followed by (t + stride) mod V, which a model has to learn
    by heart; otherwise by a token whose probability is proportional to 1 / (rank + 1).
    """

    vocabulary: int
    seed: int

    FOLLOW = 0.7

    @property
    def stride(self) -> int:
        return int(0.618 * self.vocabulary)

    @property
    def frequencies(self) -> NDArray[np.float64]:  # float64[V]
        weights = 1 / np.arange(1, self.vocabulary + 1)
        return weights / weights.sum()

    def batch(self, step: int, n_sequences: int, sequence: int) -> NDArray[np.int32]:
        rng = np.random.default_rng((self.seed, step))
        shape = n_sequences, sequence + 1
        cumulative = np.cumsum(self.frequencies)
        drawn = np.searchsorted(cumulative, rng.random(shape), side="right")
        drawn = np.minimum(drawn, self.vocabulary - 1)
        follows = rng.random(shape) < self.FOLLOW
        follows[:, 0] = False
        positions = np.arange(sequence + 1)
        last_drawn = np.maximum.accumulate(np.where(follows, 0, positions), axis=1)
        start = np.take_along_axis(drawn, last_drawn, axis=1)
        tokens = start + (positions - last_drawn) * self.stride
        return (tokens % self.vocabulary).astype(np.int32)

    @property
    def entropy(self) -> float:
        """The mean of -log p(next | last) over a sample, with the true probabilities."""
        tokens = self.batch(step=2**31, n_sequences=16, sequence=4096)
        last, following = tokens[:, :-1].astype(np.int64), tokens[:, 1:]
        probability = (1 - self.FOLLOW) * self.frequencies[following]
        probability += self.FOLLOW * (following == (last + self.stride) % self.vocabulary)
        return float(-np.log(probability).mean())


class Text:
    """Windows of bytes from text files, one token per byte."""

    entropy = None

    def __init__(self, paths: Sequence[Path], seed: int):
        self.bytes = np.frombuffer(b"\n".join(path.read_bytes() for path in paths), np.uint8)
        self.seed = seed

    def batch(self, step: int, n_sequences: int, sequence: int) -> NDArray[np.int32]:
        if len(self.bytes) <= sequence:
            raise ValueError(
                f"--text must have more bytes than --sequence {sequence}; got {len(self.bytes)}."
            )
        rng = np.random.default_rng((self.seed, step))
        starts = rng.integers(len(self.bytes) - sequence, size=n_sequences)
        return self.bytes[starts[:, None] + np.arange(sequence + 1)].astype(np.int32)
