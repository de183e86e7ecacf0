"""Tokens of formats that quantize cross between nodes as codes and scales: fewer bytes, same bits.

The nodes are groups of devices of this process, as in test_nodes.py.
"""

import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import harness
import jax_ep
import suite
from harness import AXIS, assert_same_bits, group_of, make_mesh, on_mesh, params
from jax_ep.formats import FORMATS, QUANTIZED, Plain
from jax_ep.geometry import Geometry
from jax_ep.group import EPGroup
from jax_ep.nodes import codes
from jax_ep.nodes import connection as nodes
from jax_ep.nodes.nvshmem.connection import NvshmemByNodes
from jax_ep.transports import workspaces
from node_groups import SHARED, ThriftyRails, forget_groups, layer_results
from node_groups import by_nodes as by_nodes

SCALE_MD = pathlib.Path(__file__).parents[2] / "docs" / "dev" / "scale.md"
NAMES = cases.QUANTIZED_NAMES
TWO = {name: case.replace(n_nodes=2) for name, case in cases.QUANTIZED_SMALL.items()}


def special_tokens(case) -> list:
    """Blocks that are dead, zero, subnormal, at the limits and ordinary, by turns."""
    rng = np.random.default_rng(5)
    dtype = jnp.dtype(case.token_dtype)
    values = rng.standard_normal((case.n_ranks, case.n_tokens, case.hidden_size), np.float32)
    limits = [np.nan, -np.inf, 0.0, -0.0, 1e-39, -1e-45, 3e38, 2.0**-126, 448.0, 6.0, 2688.0]
    for i, value in enumerate(limits):
        values[:, i % case.n_tokens, 16 * i :: 97] = value
    return list(values.astype(dtype))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", NAMES)
def test_special_values_match_the_oracle(name, dtype, by_nodes):
    case = TWO[name].replace(token_dtype=dtype, weights="row")
    suite.check(case, by_nodes, make_mesh(4), tokens=special_tokens(case))


CASES = [
    *(case.replace(weights="none") for case in TWO.values()),  # also without a sum
    *(case.replace(n_ranks=2, n_nodes=2, weights="row") for case in TWO.values()),
    TWO["mxfp8"].replace(n_nodes=4, weights="row"),  # a rank per node
    TWO["nvfp4"].replace(n_nodes=4),
    TWO["blockwise_fp8"].replace(**SHARED),
    TWO["mxfp4"].replace(weights="row", **SHARED),
    TWO["mxfp8"].replace(row_alignment=32, recv_capacity=64),
    TWO["blockwise_fp8"].replace(top_k=1, routing="zipf"),
    TWO["nvfp4"].replace(input_scale=0.3, weights="row"),
    TWO["nvfp4"].replace(hidden_size=16),
]


@pytest.mark.thorough
@pytest.mark.parametrize("case", params(CASES))
def test_every_feature_matches_the_oracle(case, by_nodes):
    harness.skip_rows_of_no_vectors(case, by_nodes)
    suite.check(case, by_nodes, make_mesh(case.n_ranks))


@pytest.mark.parametrize("name", NAMES)
def test_asynchronous_calls_match_the_oracle(name, by_nodes):
    suite.check(TWO[name], by_nodes, make_mesh(4), is_async=True)


def ids_of_nodes(case, nodes) -> np.ndarray:
    """Choices among the experts of `nodes(node of the token)`, none of them twice."""
    rng = np.random.default_rng(3)
    per_node = case.n_experts // case.n_nodes
    ids = np.empty((case.n_ranks, case.n_tokens, case.top_k), np.int32)
    for rank, token in itertools.product(range(case.n_ranks), range(case.n_tokens)):
        own = rank // (case.n_ranks // case.n_nodes)
        experts = np.concatenate([np.arange(per_node) + n * per_node for n in nodes(own)])
        ids[rank, token] = rng.choice(experts, case.top_k, replace=False)
    return ids


WHERE = {
    "own": lambda own: [own],
    "other": lambda own: [1 - own],
    "both": lambda own: [0, 1],
    "first": lambda own: [0],
}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", NAMES)
def test_choices_of_some_nodes_match_the_oracle(name, where, by_nodes):
    """Those of a token may all be on its own node, on one other, or on both."""
    case = TWO[name].replace(weights="row")
    suite.check(case, by_nodes, make_mesh(4), topk_ids=ids_of_nodes(case, WHERE[where]))


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_codes_that_need_not_travel_are_not_needed(name, by_nodes, monkeypatch):
    if by_nodes != "host":
        pytest.skip("on GPUs, nvshmem itself sends no more")
    forget_groups()
    monkeypatch.setattr(nodes, "XlaRails", ThriftyRails)
    for routing in ("duplicates", "out_of_range"):
        suite.check(TWO[name].replace(routing=routing, top_k=2), by_nodes, make_mesh(4))
    forget_groups()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "weights"), [*zip(NAMES, ("row", "source", "none", "row"), strict=True)]
)
def test_layers_have_the_bits_of_one_call_for_all_nodes(name, weights, by_nodes):
    """Gradients and `redispatch`, too, whose values are not quantized."""
    case = TWO[name].replace(weights=weights, routing="with_minus_one")
    got = layer_results(case, by_nodes)
    with harness.each_node_by_itself(False):
        wanted = layer_results(case, "p2p" if by_nodes == "nvshmem" else by_nodes)
    for rank, (one, other) in enumerate(zip(got, wanted, strict=True)):
        for what, x, y in zip(("out", "tokens", "weights", "again"), one, other, strict=True):
            assert_same_bits(x, y, f"{what} of rank {rank}")
            assert np.any(np.asarray(x)) or (what == "weights" and weights == "none"), what


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_tokens_that_cross_plain_have_the_same_bits(name, by_nodes, monkeypatch):
    """As they would if codes took more bytes."""
    case = TWO[name].replace(weights="row")
    encoded = layer_results(case, by_nodes)
    monkeypatch.setattr(codes, "encoded_bytes", lambda *_: 10**9)
    plain = layer_results(case, by_nodes, timeout_s=61.0)
    for one, other in zip(encoded, plain, strict=True):
        for x, y in zip(one, other, strict=True):
            assert_same_bits(x, y, name)


def crossing_bytes(case, transport: str, dtype) -> int:
    """Bytes that XLA's collectives of a dispatch take from a rank for each node, by its program."""
    group = group_of(case, transport)
    tokens = jax.ShapeDtypeStruct((4, case.n_tokens, case.hidden_size), dtype)
    ids = jax.ShapeDtypeStruct((4, case.n_tokens, case.top_k), jnp.int32)
    mapped = on_mesh(group.mesh, lambda x, i: jax_ep.dispatch(group, x, i).tokens)
    n_bytes = 0
    for eqn in all_equations(mapped.trace(tokens, ids).jaxpr.jaxpr):
        if eqn.primitive.name.startswith("all_gather") and eqn.params["axis_index_groups"]:
            n_bytes += sum(x.aval.size * x.aval.dtype.itemsize for x in eqn.invars)
    return n_bytes


def all_equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(value):
                yield from all_equations(getattr(value, "jaxpr", value))


def is_jaxpr(x) -> bool:
    return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")


# H, format and dtype of tokens; bytes of codes, of scales and of their padding.
BYTES = [
    (7168, "blockwise_fp8", "bfloat16", 7168 + 56 * 4),
    (7168, "mxfp8", "float32", 7168 + 224),
    (7168, "mxfp4", "bfloat16", 3584 + 224),
    (7168, "nvfp4", "bfloat16", 3584 + 448),
    (384, "blockwise_fp8", "bfloat16", 384 + 16),
    (224, "mxfp8", "bfloat16", 224 + 16),
    (224, "nvfp4", "float32", 112 + 16),
]


@pytest.mark.parametrize(("size", "name", "dtype", "n_bytes"), BYTES)
def test_codes_and_scales_are_all_that_crosses(size, name, dtype, n_bytes, by_nodes):
    if by_nodes == "nvshmem":
        pytest.skip("nvshmem crosses by its own kernels")
    case = TWO[name].replace(hidden_size=size, max_tokens=8)
    ids_bytes = 4 * case.top_k
    assert crossing_bytes(case, by_nodes, jnp.dtype(dtype)) == 8 * (n_bytes + ids_bytes)
    token_format = QUANTIZED[name]()
    assert codes.token_bytes(token_format, size, dtype) == n_bytes


def test_tokens_of_other_formats_cross_as_they_are(by_nodes):
    if by_nodes == "nvshmem":
        pytest.skip("nvshmem crosses by its own kernels")
    case = cases.SMALL[4].replace(n_nodes=2)
    n_bytes = case.hidden_size * 2 + 4 * case.top_k
    assert crossing_bytes(case, by_nodes, jnp.bfloat16) == case.n_tokens * n_bytes


@pytest.mark.parametrize("name", NAMES)
def test_codes_take_fewer_bytes_than_tokens_of_any_size(name):
    token_format = QUANTIZED[name]()
    for n_blocks, dtype in itertools.product(range(1, 600), token_format.token_dtypes):
        size = n_blocks * token_format.block_size
        assert codes.crosses_encoded(token_format, size, dtype), (size, dtype)
    assert codes.max_token_bytes(token_format, 7168) == codes.encoded_bytes(token_format, 7168)


def test_the_rule_compares_bytes():
    assert not codes.crosses_encoded(jax_ep.BF16(), 7168, jnp.bfloat16)
    assert codes.token_bytes(Plain(jnp.float32), 64, jnp.float32) == 256
    token_format = jax_ep.MXFP8()
    assert codes.encoded_bytes(token_format, 32) == 48
    assert codes.crosses_encoded(token_format, 32, jnp.bfloat16)
    assert not codes.crosses_encoded(token_format, 32, jnp.float8_e4m3fn)  # 32 bytes


def test_the_documentation_has_the_bytes():
    """Its table of bytes for each token of 7168 elements."""
    text = SCALE_MD.read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    formats = {"BF16": jax_ep.BF16} | {each.__name__: each for each in QUANTIZED.values()}
    assert [name for name, *_ in rows] == list(formats)
    assert len(formats) == len(FORMATS) - 2  # float16 and float32 cross as they are
    for name, *numbers in rows:
        token_format = formats[name]()
        crosses = codes.token_bytes(token_format, 7168, jnp.bfloat16)
        assert list(map(int, numbers[:2])) == [7168 * 2, crosses], name
        # What the rail's slots are for: rows of combine are longer than codes.
        config = jax_ep.EPConfig(
            n_experts=256,
            top_k=8,
            hidden_size=7168,
            max_tokens_per_rank=128,
            token_format=token_format,
        )
        assert int(numbers[2]) == max(workspaces.max_message_bytes(config), crosses), name


@pytest.mark.parametrize("name", NAMES)
def test_nvshmem_sends_words_of_codes(name, monkeypatch):
    """In both forms of a dispatch: the operand of its custom call, by its traced program."""
    case = TWO[name]
    config = harness.config_of(case)
    for min_tokens, target in ((10**6, "jax_ep_rail_gather"), (1, "jax_ep_rail_dispatch")):
        monkeypatch.setattr("jax_ep.nodes.overlapped.min_tokens", min_tokens)
        geometry = Geometry(make_mesh(4), AXIS, config, "nvshmem")
        group = EPGroup(NvshmemByNodes(geometry))
        tokens = jax.ShapeDtypeStruct((4, case.n_tokens, case.hidden_size), jnp.bfloat16)
        ids = jax.ShapeDtypeStruct((4, case.n_tokens, case.top_k), jnp.int32)
        mapped = on_mesh(geometry.mesh, lambda x, i, g=group: jax_ep.dispatch(g, x, i).tokens)
        equations = all_equations(mapped.trace(tokens, ids).jaxpr.jaxpr)
        (call,) = [each for each in equations if each.primitive.name == target]
        types = {(x.aval.dtype.name, x.aval.shape) for x in call.invars}
        n_words = codes.token_bytes(geometry.config.token_format, case.hidden_size, "bfloat16") // 4
        assert ("uint32", (case.n_tokens, n_words)) in types, types
