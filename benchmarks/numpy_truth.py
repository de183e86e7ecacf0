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

from bench_cases import N_EXPERTS, N_RANKS, TOP_K, Case, Inputs

N_LOCAL = N_EXPERTS // N_RANKS


@dataclasses.dataclass(frozen=True)
class Truth:
    """The contract's layout. A choice is an index into `[R * T, K]`, flat."""

    choices: list[np.ndarray]  # of each rank's rows in use, in order
    row_offsets: np.ndarray  # [R, L + 1]
    n_dropped: np.ndarray  # [R]
    has_row: np.ndarray  # bool[R * T, K]


def layout(case: Case, inputs: Inputs) -> Truth:
    """Rows by local expert, source rank, token, k; dropped from the end."""
    ids = inputs.topk_ids.reshape(-1)
    order = np.argsort(np.where(ids < 0, N_EXPERTS, ids), kind="stable")
    counts = np.bincount(ids[ids >= 0], minlength=N_EXPERTS).reshape(N_RANKS, N_LOCAL)
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
        has_row=has_row.reshape(-1, TOP_K),
    )


def make_expert_out(case: Case, inputs: Inputs, truth: Truth, rank: int) -> np.ndarray:
    """`[C, H]`: each row times a factor of its expert; NaN in the rows not in use."""
    out = np.full((case.n_rows, case.hidden_size), np.nan, inputs.tokens.dtype)
    choices = truth.choices[rank]
    rows = inputs.tokens[choices // TOP_K]
    factor = _expert_factor(inputs.topk_ids.reshape(-1)[choices])
    out[: len(choices)] = rows * factor[:, None].astype(rows.dtype)
    return out


def _expert_factor(ids: np.ndarray) -> np.ndarray:
    return 0.5 + ids % 4  # exact in bfloat16, and so are few-bit products


def check_dispatch(
    name: str, case: Case, inputs: Inputs, truth: Truth, dispatched: Any
) -> None:
    """Compares all that the contract defines; `dispatched` has leaves `[R, ...]`."""
    _require(name, "row_offsets", dispatched.row_offsets, truth.row_offsets)
    _require(name, "n_dropped", dispatched.n_dropped, truth.n_dropped)
    _require(name, "n_invalid", dispatched.n_invalid, np.zeros(N_RANKS))
    for rank, choices in enumerate(truth.choices):
        token = choices // TOP_K
        src_info = np.stack([token % case.n_tokens, choices % TOP_K], axis=1)
        n = len(choices)
        _require(name, "src_info", _shard(dispatched.src_info, rank)[:n], src_info)
        rows = _shard(dispatched.tokens, rank)[:n]
        _require(name, "rows", rows.view(np.uint8), inputs.tokens[token].view(np.uint8))


def check_combine(name: str, inputs: Inputs, truth: Truth, out: jax.Array) -> None:
    """Of what `make_expert_out` gives."""
    weights = truth.has_row * inputs.topk_weights * _expert_factor(inputs.topk_ids)
    expected = weights.sum(1)[:, None] * inputs.tokens.astype(np.float32)
    _require_close(name, "combine", out, expected, inputs.tokens.dtype)


def check_round_trip(name: str, inputs: Inputs, truth: Truth, results: tuple) -> None:
    """With the identity as expert: the result, and the gradients in closed form."""
    out, (d_tokens, d_weights) = results
    tokens, cotangents = (
        x.astype(np.float32) for x in (inputs.tokens, inputs.cotangents)
    )
    factor = (truth.has_row * inputs.topk_weights).sum(1)[:, None]
    dots = (tokens * cotangents).sum(1)[:, None] * truth.has_row
    dtype = inputs.tokens.dtype
    _require_close(name, "round trip", out, factor * tokens, dtype)
    _require_close(name, "gradient of tokens", d_tokens, factor * cotangents, dtype)
    _require_close(name, "gradient of weights", d_weights, dots, np.float32)


def _shard(x: jax.Array, rank: int) -> np.ndarray:
    return np.asarray(x.addressable_shards[rank].data)[0]


def _require(name: str, what: str, got: Any, expected: np.ndarray) -> None:
    if not np.array_equal(np.asarray(got), expected):
        raise AssertionError(f"{name}: {what} must equal the reference.")


def _require_close(
    name: str, what: str, got: jax.Array, expected: np.ndarray, dtype: np.dtype
) -> None:
    # float32: sums of up to H products. bfloat16: up to K roundings of 2**-9.
    tolerance = 1e-4 if dtype == np.float32 else TOP_K * 2.0**-9
    error = np.abs(np.asarray(got).astype(np.float32) - expected).max()
    limit = tolerance * max(1.0, np.abs(expected).max())
    if not error <= limit:
        raise AssertionError(
            f"{name}: {what} must be within {limit:.3g} of the reference; is off by "
            f"{error:.3g}."
        )
