"""The text, which is Python's own help topics as bytes, and windows drawn from it."""

import pydoc_data.topics
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 256  # bytes
HELD_OUT = 0.1  # fraction of the text that training never sees


class Text(NamedTuple):
    """A text in two parts, one byte per element."""

    training: NDArray[np.uint8]
    held_out: NDArray[np.uint8]


def load_text() -> Text:
    """Returns the help topics.

    Help topics quote each other, so only the first copy of each paragraph is kept. Hence no
    held-out paragraph occurs in the training text.
    """
    topics = pydoc_data.topics.topics
    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    text = "\n\n".join(dict.fromkeys(paragraphs)).encode()
    text = np.frombuffer(text, np.uint8)
    first_held_out = int(len(text) * (1 - HELD_OUT))
    return Text(text[:first_held_out], text[first_held_out:])


def unigram_entropy(text: NDArray[np.uint8]) -> float:
    """Returns the entropy in nats per byte: the lowest loss of a model that ignores context."""
    counts = np.bincount(text, minlength=VOCABULARY)
    share = counts[counts > 0] / len(text)
    return float(-(share * np.log(share)).sum())


def training_batch(
    text: NDArray[np.uint8], step: int, n_windows: int, context: int
) -> NDArray[np.int32]:
    """Returns int32[n_windows, context + 1], which depends on `step` alone."""
    rng = np.random.default_rng(step)
    starts = rng.integers(len(text) - context, size=n_windows)
    return text[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def held_out_batches(
    text: NDArray[np.uint8], n_windows: int, context: int
) -> Iterator[NDArray[np.int32]]:
    """Yields int32[n_windows, context + 1]; drops the last, incomplete batch."""
    windows = np.lib.stride_tricks.sliding_window_view(text, context + 1)[::context]
    for first in range(0, len(windows) - n_windows + 1, n_windows):
        yield windows[first : first + n_windows].astype(np.int32)
