"""Random routings for a pool of shapes: every transport matches the oracle, bitwise.

The pool is small because each shape is compiled once; the routings are arbitrary.
"""

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import suite
from cases import Case
from combine_sums import check_sums
from harness import make_mesh

_SMALL_CAPACITY = {"recv_capacity": 5, "weights": "row", "combine_dtype": "float32"}
_SHARED = {"recv_capacity": 9, "fused_shared_expert": True}
_NODES = {"n_ranks": 4, "n_experts": 8, "top_k": 4, "max_tokens": 3, "n_nodes": 2}
POOL = [
    Case(n_ranks=1, n_experts=3, top_k=2, max_tokens=4, weights="row"),
    Case(n_ranks=2, n_experts=4, top_k=3, max_tokens=3, weights="source"),
    Case(n_ranks=2, n_experts=6, top_k=2, max_tokens=5, weights="none"),
    Case(n_ranks=4, n_experts=8, top_k=3, max_tokens=4, weights="row"),
    Case(n_ranks=4, n_experts=8, top_k=3, max_tokens=4, recv_capacity=7),
    Case(n_ranks=4, n_experts=4, top_k=4, max_tokens=3, **_SMALL_CAPACITY),
    Case(n_ranks=8, n_experts=16, top_k=2, max_tokens=2, n_tokens=1, weights="row"),
    Case(n_ranks=4, n_experts=8, top_k=3, max_tokens=5, **_SHARED),
    Case(weights="none", **_NODES),
    Case(weights="row", **_NODES, **_SHARED),
]
# Cases whose sums are equal with weights given to either call.
SUMS = [
    Case(n_ranks=1, n_experts=3, top_k=3, max_tokens=4),
    Case(n_ranks=4, n_experts=8, top_k=5, max_tokens=3, recv_capacity=9),
    Case(combine_dtype="float32", **_NODES),
    Case(**_NODES, **_SHARED),
]

SETTINGS = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def any_ids(case: Case):
    """A strategy for int32[R, T, K]: valid, absent, out of range, repeated."""
    valid = st.integers(0, case.n_experts - 1)
    limits = np.iinfo(np.int32)
    wrong = st.sampled_from([-1, -2, case.n_experts, limits.min, limits.max])
    shape = (case.n_ranks, case.n_tokens, case.top_k)
    return hnp.arrays(np.int32, shape, elements=valid | wrong, fill=valid)


@pytest.mark.parametrize("case", POOL, ids=lambda case: case.name)
def test_any_routing_matches_the_oracle(case, transport):
    mesh = make_mesh(case.n_ranks)

    @SETTINGS
    @given(topk_ids=any_ids(case), seed=st.integers(0, 1 << 16))
    def holds(topk_ids, seed):
        suite.check(case.replace(seed=seed), transport, mesh, topk_ids=topk_ids)

    holds()


@pytest.mark.thorough
@pytest.mark.parametrize("case", SUMS, ids=lambda case: case.name)
def test_with_any_routing_the_sum_does_not_depend_on_where_weights_are_given(case, transport):

    @SETTINGS
    @given(topk_ids=any_ids(case), seed=st.integers(0, 1 << 16))
    def holds(topk_ids, seed):
        check_sums(case.replace(seed=seed), transport, topk_ids)

    holds()
