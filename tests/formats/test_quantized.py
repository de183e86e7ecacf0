"""The suite with quantized formats: codes, scales, layouts, padding."""

import ml_dtypes
import numpy as np
import pytest

import cases
import oracle_formats as oracle
import suite
from harness import make_mesh, params, skip_if_xla_crashes, skip_rows_of_no_vectors

NAMES = list(cases.QUANTIZED_SMALL)


@pytest.mark.parametrize("name", NAMES)
def test_every_routing_matches_the_oracle(name, transport):
    mesh = make_mesh(4)
    for case in cases.every_routing(cases.QUANTIZED_SMALL[name]):
        suite.check(case, transport, mesh)


@pytest.mark.parametrize("case", params(cases.QUANTIZED_EDGE))
def test_edge_cases_and_layouts_match_the_oracle(case, transport):
    skip_if_xla_crashes(case)
    skip_rows_of_no_vectors(case, transport)
    mesh = make_mesh(case.n_ranks)
    for name in ("uniform", "one_expert_k_times", "empty_experts"):
        suite.check(case.replace(routing=name), transport, mesh)


@pytest.mark.parametrize("case", params(cases.QUANTIZED_SEED))
def test_seed_shapes_match_the_oracle(case, transport):
    suite.check(case, transport, make_mesh(case.n_ranks))


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dp", "n_ranks"), [(1, 1), (2, 4), (1, 8)])
def test_every_mesh_matches_the_oracle(dp, n_ranks, name, transport):
    shape = cases.SMALL[n_ranks]
    case = cases.QUANTIZED_SMALL[name].replace(
        n_ranks=n_ranks, n_experts=shape.n_experts, top_k=shape.top_k, routing="zipf"
    )
    suite.check(case, transport, make_mesh(n_ranks, dp), check_vma=dp == 1)


@pytest.mark.parametrize("name", NAMES)
def test_asynchronous_calls_match_the_oracle(name, transport):
    suite.check(cases.QUANTIZED_SMALL[name], transport, make_mesh(4), is_async=True)


@pytest.mark.parametrize("name", NAMES)
def test_every_bfloat16_matches_the_oracle(name, transport):
    """Through dispatch, as an element and as the maximum of its block."""
    size, hidden_size = oracle.BLOCK_SIZE[name], 8192
    patterns = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    fractions = np.linspace(1, -0.9, size, dtype=np.float32)
    with np.errstate(all="ignore"):
        blocks = patterns.astype(np.float32)[:, None] * fractions
    tokens = np.concatenate([patterns, blocks.astype(patterns.dtype).ravel()])
    tokens = tokens.reshape(-1, hidden_size)
    case = cases.QUANTIZED_SMALL[name].replace(
        n_ranks=1,
        n_experts=2,
        top_k=2,
        hidden_size=hidden_size,
        max_tokens=len(tokens),
        weights="none",
    )
    suite.check(case, transport, make_mesh(1), tokens=[tokens])


@pytest.mark.parametrize("name", NAMES)
def test_float32_up_to_the_largest_match_the_oracle(name, transport):
    """Of each block, the maximum is in the last four binades, or beyond what bfloat16 has."""
    rng = np.random.default_rng(5)
    exponents = np.repeat(rng.integers(251, 255, 64), 128) << 23
    signs = rng.integers(0, 2, exponents.size) << 31
    patterns = signs | exponents | rng.integers(0, 1 << 23, exponents.size)
    patterns[:1024] |= 254 << 23 | 0x7F8000
    tokens = patterns.astype(np.uint32).view(np.float32).reshape(-1, 1024)
    input_scale = 1e-37 if name == "nvfp4" else None
    case = cases.QUANTIZED_SMALL[name].replace(
        n_ranks=1, n_experts=2, top_k=2, hidden_size=1024, max_tokens=len(tokens), weights="none"
    )
    case = case.replace(token_dtype="float32", input_scale=input_scale)
    suite.check(case, transport, make_mesh(1), tokens=[tokens])


@pytest.mark.parametrize("input_scale", [1e-38, 3e38])
def test_an_input_scale_that_is_or_has_a_subnormal_reciprocal_matches_the_oracle(
    input_scale, transport
):
    """XLA's threads flush subnormal numbers; ours must not."""
    case = cases.QUANTIZED_SMALL["nvfp4"].replace(
        n_ranks=1, n_experts=2, top_k=2, hidden_size=64, max_tokens=4, weights="none"
    )
    case = case.replace(token_dtype="float32", input_scale=input_scale)
    size = np.float32(1e38 if input_scale < 1 else 1e-35)
    tokens = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32) * size
    suite.check(case, transport, make_mesh(1), tokens=[tokens])
