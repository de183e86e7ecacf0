"""Random shapes with every option of a group, and random routings of a shape.

All are functions of a seed and of the number of devices, so that every process of a job has the
same cases.
"""

import numpy as np

import routing
import suite
from cases import QUANTIZED_NAMES, Case

_DTYPES = ("bfloat16", "float16", "float32")


def random_shape(seed: int, n_ranks: tuple[int, ...]) -> Case:
    """A case with one of the given numbers of ranks."""
    rng = np.random.default_rng([0, seed])

    def pick(*values):
        return values[rng.integers(len(values))]

    n = pick(*n_ranks)
    token_format = pick("plain", "plain", *QUANTIZED_NAMES)
    is_plain = token_format == "plain"
    max_tokens = pick(1, 2, 5, 16, 40)
    skip_a2a = bool(rng.random() < 0.1)
    n_experts = n * pick(1, 2, 3, 8, 20)
    case = Case(
        n_ranks=n,
        n_experts=n_experts,
        top_k=min(n_experts, pick(1, 2, 3, 6, 8, 16)),
        hidden_size=8 * pick(1, 3, 16, 33) if is_plain else 128 * pick(1, 2, 3),
        max_tokens=max_tokens,
        n_tokens=pick(max_tokens, int(rng.integers(1, max_tokens + 1))),
        token_dtype=pick(*_DTYPES) if is_plain else pick("bfloat16", "float32"),
        token_format=token_format,
        scales_layout=None if is_plain else pick(None, "row_major"),
        combine_dtype=pick(*_DTYPES),
        row_alignment=pick(1, 1, 1, 4, 16, 32, 64, 128, 256),
        weights=pick("none", "source", "row"),
        n_nodes=None if skip_a2a else pick(None, *(i for i in (1, 2, 4) if n % i == 0)),
        fused_shared_expert=bool(rng.random() < 0.25),
        skip_a2a=skip_a2a,
    )
    return case.replace(recv_capacity=pick(None, _random_capacity(case, rng)))


def _random_capacity(case: Case, rng) -> int:
    alignment = suite.alignment_of(case)
    return alignment * int(rng.integers(1, 1 + -(-suite.n_rows_of(case) // alignment)))


def random_ids(case: Case, seed: int) -> np.ndarray:
    """int32[R, T, K]: one of `routing.ROUTINGS`, or any ids, among them wrong ones."""
    rng = np.random.default_rng([1, seed])
    sizes = (case.n_ranks, case.n_tokens, case.n_experts, case.top_k)
    name = rng.choice(["any", "any", *routing.ROUTINGS])
    ids = _any_ids(rng, case) if name == "any" else routing.make(name, seed, *sizes)
    return np.broadcast_to(ids[:1], ids.shape) if case.skip_a2a else ids


def _any_ids(rng, case: Case) -> np.ndarray:
    shape = (case.n_ranks, case.n_tokens, case.top_k)
    limits = np.iinfo(np.int32)
    wrong = rng.choice([-1, -2, case.n_experts, limits.min, limits.max], shape)
    ids = np.where(rng.random(shape) < 0.2, wrong, rng.integers(case.n_experts, size=shape))
    return ids.astype(np.int32)
