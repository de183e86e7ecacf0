"""The expected results of every implementation, in NumPy: rows, counts and sums."""

import numpy as np

from case import Case


class Truth:
    """The expected results for a routing. A choice is a flat index into `[R * T, K]`.

    Attributes:
        choice_of_row: `int32[R, C]`, ordered by local expert, source rank, token, k; -1 in rows
            that are not in use.
        factor_of_row: `float32[R, C]`, what the row's expert multiplies it by; NaN in rows that
            are not in use.
        has_row: `bool[R * T, K]`, whether a choice has a row; rows beyond C are dropped.
        counts: results of dispatch with one number per rank or per expert, by name.
        weight: `float64[R * T]`, what a round trip with the identity multiplies a token by.
        expert_weight: the same with experts that multiply by their factors.
    """

    def __init__(self, case: Case, topk_ids: np.ndarray, weights: np.ndarray) -> None:
        ids, n_rows = topk_ids.reshape(-1), case.n_rows
        order = np.argsort(np.where(ids < 0, case.n_experts, ids), kind="stable")
        per_expert = np.bincount(ids[ids >= 0], minlength=case.n_experts)
        per_expert = per_expert.reshape(case.n_ranks, -1)
        offsets = np.pad(np.cumsum(per_expert, axis=1), [(0, 0), (1, 0)])
        self.counts = {
            "row_offsets": np.minimum(offsets, n_rows),
            "n_dropped": np.maximum(offsets[:, -1] - n_rows, 0),
            "n_invalid": np.zeros(case.n_ranks),
        }
        self.choice_of_row = np.full((case.n_ranks, n_rows), -1, np.int32)
        ends = np.cumsum(offsets[:, -1])
        for row, end, n in zip(self.choice_of_row, ends, offsets[:, -1], strict=True):
            row[: min(n, n_rows)] = order[end - n : end][:n_rows]
        in_use = self.choice_of_row >= 0
        factor = np.where(in_use, _expert_factor(ids[self.choice_of_row]), np.nan)
        self.factor_of_row = factor.astype(np.float32)
        self.has_row = np.zeros(topk_ids.shape, bool)
        self.has_row.reshape(-1)[self.choice_of_row[in_use]] = True
        products = (self.has_row * weights).astype(np.float64)
        self.weight = products.sum(axis=1)
        self.expert_weight = (products * _expert_factor(topk_ids)).sum(axis=1)


def _expert_factor(ids: np.ndarray) -> np.ndarray:
    """The factor of an expert's rows; has few bits, so that products round little."""
    return 0.5 + ids % 4
