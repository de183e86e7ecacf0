"""`fused_shared_expert` and `skip_a2a`, apart and together: bits, and closed forms."""

from __future__ import annotations

import jax
import pytest

import cases
import suite
from harness import make_mesh, params

MODES = ["none", "source", "row"]
FLAGS = list(cases.FLAGS)


@pytest.mark.parametrize("weights", MODES)
@pytest.mark.parametrize("flags", FLAGS)
def test_every_routing_gives_the_oracles_bits(flags, weights, transport):
    mesh = make_mesh(4)
    case = cases.SMALL[4].but(weights=weights, **cases.FLAGS[flags])
    for each in cases.every_routing(case):
        suite.check(each, transport, mesh)


@pytest.mark.parametrize("case", params(cases.FLAGS_ODD))
def test_odd_shapes_give_the_oracles_bits(case, transport):
    if case.n_tokens == 0 and jax.__version_info__[:2] == (0, 11):
        # As in test_dispatch_combine.py.
        pytest.skip("XLA of jax 0.11 crashes on custom calls beside empty operands")
    mesh = make_mesh(case.n_ranks)
    for name in ("uniform", "out_of_range"):
        suite.check(case.but(routing=name), transport, mesh)
