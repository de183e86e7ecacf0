"""Exchange and call as one operation (nodes/overlapped.py), on CPUs.

Transport `nvshmem` has such operations, which need GPUs. Here they are made of the others, of
transport `host`; what is tested is how they are put together, and their gradients.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import async_calls
import cases
import closed_forms
import harness
import suite
from harness import assert_same_bits, assert_trees_equal, group_of, make_mesh, on_mesh, params, put
from jax_ep.exchange.async_calls import InFlightCombine, InFlightDispatch
from jax_ep.exchange.calls import (
    bind_combine,
    bind_dispatch,
    combine_grad_call,
    combine_grad_p,
    present,
)
from jax_ep.group import select
from jax_ep.nodes import overlapped
from jax_ep.nodes.connection import HostByNodes
from jax_ep.nodes.rails import OverlappingRails
from jax_ep.nodes.routing import needs
from node_groups import FOUR, SHARED, TWO, ThriftyRails, forget_groups, layer_results, with_nodes

bound = []  # the operations that have been traced
FORWARD, BACKWARD = {"dispatch", "combine"}, {"dispatch_grads", "combine_grads"}


class Completed(InFlightCombine):
    """A combine that was complete when it was started."""

    def then(self, x):
        return x


class ThriftyOverlappingRails(ThriftyRails, OverlappingRails):
    """Rails that send no more than they must, then call `host`."""

    def dispatch(self, operands, group_ids):
        bound.append("dispatch")
        tokens = self.all_gather(operands.tokens, needs(self.geometry, group_ids))
        handle_shape = self.inner.handle_shape(operands.group_ids.shape[0])
        within = dataclasses.replace(operands, tokens=tokens)
        return bind_dispatch(self.inner.geometry, within, handle_shape)

    def combine(self, operands):
        bound.append("combine")
        return self._combine(operands)[0]

    def _combine(self, operands):
        within = dataclasses.replace(operands, residual=None)
        sums, *scalars = bind_combine(self.inner.geometry, within)
        return [self.reduce_scatter(sums, operands.residual, operands.routing.group_ids), *scalars]

    def start_dispatch(self, operands, group_ids):
        bound.append("start_dispatch")
        results = self.dispatch(jax.lax.stop_gradient(operands), group_ids)
        bound.pop()
        return InFlightDispatch(None, None, tuple(present(*results)), None)

    def start_combine(self, operands):
        bound.append("start_combine")
        return Completed(self._combine(jax.lax.stop_gradient(operands))[0], None, None)

    def dispatch_grads(self, operands, slots):
        bound.append("dispatch_grads")
        assert slots is None
        return self._combine(operands), None

    def combine_grads(self, operands, cotangent, group_ids, slots):
        bound.append("combine_grads")
        assert slots is None
        gathered = self.all_gather(cotangent, needs(self.geometry, group_ids))
        arrays, params = combine_grad_call(self.inner.geometry, operands, gathered)
        return combine_grad_p.bind(*arrays, **params), None


class OverlappingHost(HostByNodes):
    """`host` inside nodes, such rails between them."""

    def make_rails(self, geometry, inner):
        return ThriftyOverlappingRails(geometry, inner)


@pytest.fixture(scope="module", autouse=True)
def overlapping(request):
    """Has `host` by nodes take these operations, with any number of tokens."""
    if request.config.option.gpu:
        pytest.skip("on GPUs, test_nvshmem.py has the operations themselves")
    forget_groups()
    with harness.each_node_by_itself(), pytest.MonkeyPatch.context() as patch:
        transports = [OverlappingHost if x is HostByNodes else x for x in select._FASTEST_FIRST]
        patch.setattr(select, "_FASTEST_FIRST", tuple(transports))
        patch.setattr(overlapped, "min_tokens", 1)
        yield
    forget_groups()


@pytest.fixture
def traced():
    """The operations that the test has traced."""
    bound.clear()
    return bound


CASES = [
    *(TWO.replace(weights=weights, routing="duplicates") for weights in ("none", "row")),
    *(
        FOUR.replace(weights=weights, routing="out_of_range", top_k=2)
        for weights in ("none", "row")
    ),
    FOUR.replace(n_nodes=8, weights="source"),  # one rank per node
    FOUR.replace(n_nodes=2, weights="source", **SHARED),
    TWO.replace(weights="row", recv_capacity=33, **SHARED),
    TWO.replace(row_alignment=16, weights="row"),
    TWO.replace(n_tokens=0),
    *with_nodes(cases.DTYPES)[:2],
    *with_nodes(cases.QUANTIZED_EDGE)[:2],
    cases.QUANTIZED_SMALL["nvfp4"].replace(n_nodes=2, input_scale=0.3),
]


@pytest.mark.parametrize("case", params(CASES))
def test_calls_match_the_oracle(case, traced):
    harness.skip_if_xla_crashes(case)
    suite.check(case, "host", make_mesh(case.n_ranks))
    assert set(traced) == FORWARD


@pytest.mark.parametrize("case", params(CASES))
def test_asynchronous_calls_match_the_oracle(case, traced):
    harness.skip_if_xla_crashes(case)
    suite.check(case, "host", make_mesh(case.n_ranks), is_async=True)
    assert set(traced) == {"start_dispatch", "start_combine"}


def test_few_tokens_do_not_overlap(traced, monkeypatch):
    monkeypatch.setattr(overlapped, "min_tokens", TWO.max_tokens + 1)
    suite.check(TWO.replace(weights="none", seed=7, hidden_size=256), "host", make_mesh(4))
    suite.check(TWO.replace(weights="none", seed=8), "host", make_mesh(4), is_async=True)
    assert traced == []


@pytest.mark.parametrize("weights", closed_forms.MODES)
def test_a_combine_overlaps_from_fewer_tokens_on_than_a_dispatch(weights, traced, monkeypatch):
    monkeypatch.setattr(overlapped, "min_tokens", TWO.max_tokens + 1)
    monkeypatch.setattr(overlapped, "min_combine_tokens", TWO.max_tokens)
    forget_groups()
    case = TWO.replace(weights=weights, routing="duplicates")
    closed_forms.check_closed_forms(case, "host")
    forget_groups()
    assert set(traced) == {"combine"}


@pytest.mark.parametrize("weights", closed_forms.MODES)
@pytest.mark.parametrize("flags", [{}, SHARED], ids=["plain", "shared"])
def test_gradients_match_their_closed_forms(weights, flags, traced):
    for routing in ("duplicates", "out_of_range"):
        closed_forms.check_closed_forms(
            TWO.replace(weights=weights, routing=routing, **flags), "host"
        )
    assert set(traced) == FORWARD | BACKWARD


@pytest.mark.parametrize("weights", closed_forms.MODES)
def test_gradients_have_the_bits_of_separate_calls(weights, monkeypatch):
    """Those of weights, too, which the oracle only knows within rounding."""
    case = TWO.replace(weights=weights, routing="duplicates", recv_capacity=40)
    got = closed_forms.gradients(case, "host")[-1]
    forget_groups()
    monkeypatch.setattr(overlapped, "min_tokens", 10**6)
    wanted = closed_forms.gradients(case, "host")[-1]
    forget_groups()
    for where, results in wanted.items():
        for name, array in results.items():
            assert_same_bits(got[where][name], array, f"{name} of {where}")


@pytest.mark.parametrize("weights", ["row", "source"])
def test_gradients_of_asynchronous_calls_have_the_bits_of_synchronous_ones(weights, traced):
    case = TWO.replace(routing="duplicates")
    group, inputs = group_of(case, "host"), suite.make_inputs(case)
    operands = (np.nan_to_num(x)[:, None] for x in inputs.arrays()[:3])  # of one call
    operands = put(group.mesh, *operands)
    got, wanted = (
        on_mesh(group.mesh, functools.partial(async_calls.gradients, group, weights, is_async))(
            *operands
        )
        for is_async in (True, False)
    )
    assert_trees_equal(group.mesh, got, wanted, "gradients")
    assert set(traced) == {"start_dispatch", "start_combine"} | FORWARD | BACKWARD


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_gradients_of_other_dtypes_match_their_closed_forms(dtype):
    case = TWO.replace(weights="row", routing="zipf", combine_dtype=dtype)
    closed_forms.check_closed_forms(case, "host")


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "weights"), [("mxfp8", "row"), ("nvfp4", "source")])
def test_layers_of_formats_that_quantize_have_the_bits_of_separate_calls(
    name, weights, traced, monkeypatch
):
    """Codes have no gradient, weights beside them have."""
    case = cases.QUANTIZED_SMALL[name].replace(n_nodes=2, weights=weights)
    got = layer_results(case, "host")
    assert set(traced) == {*FORWARD, "combine_grads"}
    monkeypatch.setattr(overlapped, "min_tokens", 10**6)
    wanted = layer_results(case, "host", timeout_s=61.0)
    for one, other in zip(got, wanted, strict=True):
        for what, x, y in zip(("out", "tokens", "weights", "again"), one, other, strict=True):
            assert_same_bits(x, y, what)
            assert np.any(np.asarray(x)), what
