"""What every contestant must compute, in NumPy, and checks against it.

Dispatch is compared in bits. Combine and gradients are sums in another order with
another rounding in between, so they are close: within a few units of the last place of
the largest value.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from bench_cases import Case, Inputs


@dataclasses.dataclass(frozen=True)
class Truth:
    """The contract's layout. A choice is an index into `[R * T, K]`, flat."""

    choices: list[np.ndarray]  # of each rank's rows in use, in order
    row_offsets: np.ndarray  # [R, L + 1]
    n_dropped: np.ndarray  # [R]
    has_row: np.ndarray  # bool[R * T, K]


def layout(case: Any, inputs: Any) -> Truth:
    """Rows by local expert, source rank, token, k; dropped from the end."""
    ids = inputs.topk_ids.reshape(-1)
    order = np.argsort(np.where(ids < 0, case.n_experts, ids), kind="stable")
    counts = np.bincount(ids[ids >= 0], minlength=case.n_experts)
    counts = counts.reshape(case.n_ranks, -1)
    ends = np.cumsum(counts.sum(1))
    choices = [
        order[end - count.sum() : end][: case.n_rows]
        for end, count in zip(ends, counts, strict=True)
    ]
    has_row = np.zeros(ids.shape, bool)
    has_row[np.concatenate(choices)] = True
    offsets = np.pad(np.cumsum(counts, axis=1), [(0, 0), (1, 0)])
    return Truth(
        choices=choices,
        row_offsets=np.minimum(offsets, case.n_rows),
        n_dropped=np.maximum(offsets[:, -1] - case.n_rows, 0),
        has_row=has_row.reshape(-1, case.top_k),
    )


def make_expert_out(case: Case, inputs: Inputs, truth: Truth, rank: int) -> np.ndarray:
    """`[C, H]`: each row times a factor of its expert; NaN in the rows not in use."""
    out = np.full((case.n_rows, case.hidden_size), np.nan, inputs.tokens.dtype)
    choices = truth.choices[rank]
    rows = inputs.tokens[choices // case.top_k]
    factor = expert_factor(inputs.topk_ids.reshape(-1)[choices])
    out[: len(choices)] = rows * factor[:, None].astype(rows.dtype)
    return out


def expert_factor(ids: np.ndarray) -> np.ndarray:
    """What an expert multiplies its rows with."""
    return 0.5 + ids % 4  # exact in bfloat16, and so are few-bit products


def check_dispatch(
    name: str, case: Case, inputs: Inputs, truth: Truth, dispatched: Any
) -> None:
    """Compares all that the contract defines; `dispatched` has leaves `[R, ...]`."""
    check_counts(name, truth, dispatched)
    for rank, choices in enumerate(truth.choices):
        check_src_info(name, case, choices, rank, dispatched)
        rows = shard(dispatched.tokens, rank)[: len(choices)]
        tokens = inputs.tokens[choices // case.top_k]
        require(name, "rows", rows.view(np.uint8), tokens.view(np.uint8))


def check_counts(name: str, truth: Truth, dispatched: Any) -> None:
    """What is one number, or one per expert."""
    require(name, "row_offsets", dispatched.row_offsets, truth.row_offsets)
    require(name, "n_dropped", dispatched.n_dropped, truth.n_dropped)
    require(name, "n_invalid", dispatched.n_invalid, np.zeros(len(truth.choices)))


def check_src_info(
    name: str, case: Any, choices: np.ndarray, rank: int, dispatched: Any
) -> None:
    """Token and k of each row in use."""
    token, k = choices // case.top_k % case.n_tokens, choices % case.top_k
    src_info = shard(dispatched.src_info, rank)[: len(choices)]
    require(name, "src_info", src_info, np.stack([token, k], axis=1))


def check_combine(name: str, inputs: Inputs, truth: Truth, out: jax.Array) -> None:
    """Of what `make_expert_out` gives."""
    weights = truth.has_row * inputs.topk_weights * expert_factor(inputs.topk_ids)
    expected = weights.sum(1)[:, None] * inputs.tokens.astype(np.float32)
    tolerance = _tolerance(inputs.tokens.dtype, weights.shape[1])
    require_close(name, "combine", out, expected, tolerance)


def check_round_trip(name: str, inputs: Inputs, truth: Truth, results: tuple) -> None:
    """With the identity as expert: the result, and the gradients in closed form."""
    out, (d_tokens, d_weights) = results
    tokens, cotangents = (
        x.astype(np.float32) for x in (inputs.tokens, inputs.cotangents)
    )
    factor = (truth.has_row * inputs.topk_weights).sum(1)[:, None]
    dots = (tokens * cotangents).sum(1)[:, None] * truth.has_row
    most = _tolerance(inputs.tokens.dtype, dots.shape[1])
    require_close(name, "round trip", out, factor * tokens, most)
    require_close(name, "gradient of tokens", d_tokens, factor * cotangents, most)
    least = _tolerance(np.dtype(np.float32), dots.shape[1])
    require_close(name, "gradient of weights", d_weights, dots, least)


def shard(x: jax.Array, rank: int) -> np.ndarray:
    """One rank's of an array with a leading axis of ranks."""
    return np.asarray(x.addressable_shards[rank].data)[0]


def require(name: str, what: str, got: Any, expected: np.ndarray) -> None:
    """Equality.

    Raises:
        AssertionError: they differ.
    """
    if not np.array_equal(np.asarray(got), expected):
        raise AssertionError(f"{name}: {what} must equal the reference.")


def require_close(
    name: str, what: str, got: Any, expected: np.ndarray, tolerance: float
) -> None:
    """`tolerance` is of the largest value expected, or of 1.

    Raises:
        AssertionError: they differ by more.
    """
    error = np.abs(np.asarray(got).astype(np.float32) - expected).max()
    limit = tolerance * max(1.0, np.abs(expected).max())
    if not error <= limit:
        raise AssertionError(
            f"{name}: {what} must be within {limit:.3g} of the reference; is off by "
            f"{error:.3g}."
        )


def _tolerance(dtype: np.dtype, top_k: int) -> float:
    """float32: sums of up to H products. bfloat16: up to K roundings of 2**-9."""
    return 1e-4 if dtype == np.float32 else top_k * 2.0**-9
