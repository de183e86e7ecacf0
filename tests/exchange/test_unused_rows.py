"""`EPConfig(zero_unused_rows=True)`: zeros in rows that are not in use, and in their gradients.

These rows are poisoned first, as a transport may leave anything there.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jax_ep
import suite
from closed_forms import assert_equal
from harness import (
    AXIS,
    assert_same_bits,
    bits,
    config_of,
    group_of,
    make_mesh,
    on_mesh,
    put,
    shards,
)
from jax_ep.exchange import rules
from jax_ep.exchange.calls import combine_grad_p

CASES = {
    "plain": cases.SMALL[4],
    "float16": cases.SMALL[4].replace(token_dtype="float16", combine_dtype="float16"),
    "dropped": cases.SMALL[4].replace(recv_capacity=30),
    "shared": cases.SMALL[4].replace(**cases.FLAGS["shared"]),
    "skip_a2a": cases.SMALL[4].replace(n_tokens=13, **cases.FLAGS["skip_a2a"]),
    **{name: cases.QUANTIZED_SMALL[name] for name in cases.QUANTIZED_NAMES},
    "row-major scales": cases.QUANTIZED_EDGE[1],
    "blocks of atoms": cases.Case(
        n_ranks=2, n_experts=4, top_k=2, max_tokens=100, hidden_size=128, token_format="mxfp8"
    ),
}
CASES = {name: case.replace(weights="row") for name, case in CASES.items()}


def poisoned(results, layout):
    """The results of a transport's dispatch, with all bits set outside of the rows in use."""
    n_rows = results.src_info.shape[0]
    used = jnp.arange(n_rows, dtype=jnp.uint32) < results.row_offsets[-1]
    poison = functools.partial(set_all_bits_unless, used)
    changes = {
        "tokens": poison(results.tokens),
        "src_info": jnp.where(used[:, None], results.src_info, suite.OUT_OF_RANGE_INDEX),
    }
    if results.row_weights is not None:
        changes["row_weights"] = poison(results.row_weights)
    if results.scales is not None:
        scales = results.scales
        if layout == "atoms":
            blocks = -(-jnp.diff(results.row_offsets.astype(jnp.int32)) // 128)
            used = jnp.arange(scales.shape[0], dtype=jnp.int32) < blocks.sum(dtype=jnp.int32)
        axis = 1 if layout == "transposed" else 0
        changes["scales"] = set_all_bits_unless(used, scales, axis)
    return results._replace(**changes)


def set_all_bits_unless(used, x, axis=0):
    """NaN, in floats; the gradient is that of the rows in use."""
    used = jnp.expand_dims(used, [i for i in range(x.ndim) if i != axis])
    integer = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    ones = jax.lax.bitcast_convert_type(jnp.full((), -1).astype(integer), x.dtype)
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1:
        return jnp.where(used, x, ones)
    kept = jnp.where(used, jax.lax.bitcast_convert_type(x, integer), jnp.iinfo(integer).max)
    return jax.lax.bitcast_convert_type(kept, x.dtype)


@pytest.fixture
def open_group(transport, monkeypatch):
    """A function that opens a group of a case, whose calls leave poison in unused rows."""

    def call_in_backward(slots, call_p, start_p, arrays, params):
        results, slots = original(slots, call_p, start_p, arrays, params)
        if call_p is not combine_grad_p:
            return results, slots
        (rows, *weights), row_offsets = results, arrays[2]
        used = jnp.arange(len(rows), dtype=jnp.uint32) < row_offsets[-1]
        return [set_all_bits_unless(used, rows), *weights], slots

    original = rules.call_in_backward
    monkeypatch.setattr(rules, "call_in_backward", call_in_backward)

    def open_group(case, is_poisoned=True, dp=1, **changes):
        group = group_of(case, transport, make_mesh(case.n_ranks, dp), **changes)
        calls = group._connection.calls
        dispatch, finish = calls.dispatch, calls.finish

        def poison(results):
            is_dispatch = hasattr(results, "src_info")
            return poisoned(results, suite.layout_of(case)) if is_dispatch else results

        if is_poisoned:
            calls.dispatch = lambda operands: poison(dispatch(operands))
            if transport == "p2p":  # elsewhere, `start` calls `dispatch`
                calls.finish = lambda *args: poison(finish(*args))
        return group

    return open_group


def zeroing(open_group, case, **options):
    return open_group(case, zero_unused_rows=True, **options)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "is_async"), [*((name, False) for name in CASES), ("plain", True), ("mxfp8", True)]
)
def test_unused_rows_are_zero_and_others_as_ever(name, is_async, open_group):
    case = CASES[name]
    group = zeroing(open_group, case)

    def body(tokens, topk_ids, topk_weights):
        rows = suite.dispatch(group, tokens, topk_ids, topk_weights, is_async=is_async)
        return suite.fields(rows)

    run = on_mesh(group.mesh, body)
    for routing in (case.routing, "zipf", "nothing"):
        inputs = suite.make_inputs(case.replace(routing=routing))
        wanted = suite.expected(case, inputs)
        for (_, rank), got in shards(group.mesh, run(*put(group.mesh, *inputs.arrays()[:3]))):
            n_used = len(inputs.routed.rows[rank])
            assert n_used < inputs.routed.n_rows or routing != "nothing"
            want = {k: v for k, v in wanted[rank].items() if k in got}
            suite.assert_rank_matches(got, want, inputs.routed.n_rows, f"{name}, rank {rank}")
            assert not bits(got["tokens"][n_used:]).any()
            assert not bits(got["row_weights"][n_used:]).any()
            assert (got["src_info"][n_used:] == -1).all()
            if "scales" in got:
                is_defined = want["scales"].is_defined
                assert not bits(got["scales"])[~is_defined].any()


def reducing_experts(group, weights_at, is_masked, tokens, topk_ids, topk_weights, scale):
    """Elementwise experts with a shared parameter, and a mean over all rows."""
    at_row, at_source = suite.weights_for(weights_at, topk_weights)
    rows = jax_ep.dispatch(group, tokens, topk_ids, *at_row)
    x = jax_ep.dequantize(rows) if is_masked else rows.tokens
    if group.config.token_format.scale_dtype is not None:
        x = jax_ep.dequantize(rows)
    results = jnp.tanh(x * scale)
    mean = jnp.mean(results.astype(jnp.float32) ** 2)
    if is_masked:
        results = suite.clear_unused(results, rows.row_offsets)
    out = jax_ep.combine(group, results, rows, *at_source)
    return jnp.sum(out.astype(jnp.float32) ** 2) + mean


def value_and_gradients(group, weights_at, is_masked, *operands, wrap=lambda f: f):
    def loss(tokens, topk_weights, scale):
        layer = wrap(functools.partial(reducing_experts, group, weights_at, is_masked))
        return layer(tokens, operands[1], topk_weights, scale)

    tokens, _, topk_weights = operands
    scale = jax.lax.pcast(jnp.ones(tokens.shape[-1], tokens.dtype), AXIS, to="varying")
    return jax.value_and_grad(loss, argnums=(0, 1, 2))(tokens, topk_weights, scale)


def arrays_of(case) -> list:
    tokens, topk_ids, topk_weights = suite.make_inputs(case).arrays()[:3]
    return [tokens, topk_ids, [np.nan_to_num(each) for each in topk_weights]]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "weights_at"),
    [
        ("plain", "source"),
        ("plain", "none"),
        *((name, "row") for name in ("plain", "float16", "dropped", "shared", "mxfp8")),
    ],
)
def test_experts_need_no_masks(name, weights_at, open_group):
    """Value and gradients are those of masked experts of a group that does not zero."""
    case = CASES[name].replace(routing="zipf")
    groups = {False: zeroing(open_group, case), True: open_group(case, is_poisoned=False)}
    operands = put(groups[True].mesh, *arrays_of(case))
    got, wanted = (
        on_mesh(group.mesh, functools.partial(value_and_gradients, group, weights_at, is_masked))(
            *operands
        )
        for is_masked, group in groups.items()
    )
    for _, each in shards(groups[True].mesh, wanted):
        leaves = jax.tree.leaves(each)
        assert all(np.isfinite(np.float32(x)).all() for x in leaves)
        assert np.any(leaves[3])
    assert_equal(groups[True], got, wanted, name)


def test_without_the_option_such_experts_are_wrong(open_group):
    """So the test above can fail."""
    case = CASES["plain"].replace(routing="zipf")
    group = open_group(case)
    body = functools.partial(value_and_gradients, group, "row", False)
    out = on_mesh(group.mesh, body)(*put(group.mesh, *arrays_of(case)))
    for _, (loss, (_, _, d_scale)) in shards(group.mesh, out):
        assert np.isnan(loss)
        assert np.isnan(d_scale.astype(np.float32)).any()


def cotangent_of_rows(group, tokens, topk_ids, topk_weights):
    rows = jax_ep.dispatch(group, tokens, topk_ids)
    out, pull = jax.vjp(lambda x: jax_ep.combine(group, x, rows, topk_weights), rows.tokens)
    return pull(out)[0], rows.row_offsets


@pytest.mark.parametrize("name", ["plain", "dropped", "shared"])
def test_the_gradient_of_expert_out_is_zero_in_unused_rows(name, open_group):
    case = CASES[name].replace(routing="zipf", weights="source")
    zeroes, leaves = zeroing(open_group, case), open_group(case, is_poisoned=False)
    operands = put(zeroes.mesh, *arrays_of(case))
    got, wanted = (
        on_mesh(zeroes.mesh, functools.partial(cotangent_of_rows, each))(*operands)
        for each in (zeroes, leaves)
    )
    pairs = zip(shards(zeroes.mesh, got), shards(zeroes.mesh, wanted), strict=True)
    for (_, (one, offsets)), (_, (other, _)) in pairs:
        used = slice(int(offsets[-1]))
        assert_same_bits(one[used], other[used], "rows in use")
        assert not bits(one[int(offsets[-1]) :]).any()


WRAPS = {
    "remat": jax.checkpoint,
    "saved": lambda f: jax.checkpoint(
        f, policy=jax.checkpoint_policies.save_only_these_names(jax_ep.DISPATCH_NAME)
    ),
    "jit": jax.jit,
    "vmap": lambda f: lambda *xs: jax.vmap(f)(*(x[None] for x in xs))[0],
    "scan": lambda f: lambda *xs: jax.lax.scan(lambda c, _: (c, f(*xs)), 0, length=2)[1][0],
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", WRAPS)
def test_zeros_compose_with_transformations(name, open_group):
    case = CASES["plain"].replace(routing="zipf")
    group = zeroing(open_group, case)
    operands = put(group.mesh, *arrays_of(case))
    got, wanted = (
        on_mesh(group.mesh, functools.partial(value_and_gradients, group, "row", False, wrap=wrap))(
            *operands
        )
        for wrap in (WRAPS[name], lambda f: f)
    )
    assert_equal(group, got, wanted, name)


@pytest.mark.thorough
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("check_vma", [True, False])
def test_zeros_compose_with_vmap_with_spmd_axis_name(check_vma, transport, open_group):
    """The gradients are those of each entry of the mapped axis."""
    if transport == "xla" and check_vma:
        pytest.skip("combine cannot be traced there: see docs/sharp_bits.md")
    case = cases.SMALL[2].replace(max_tokens=8)
    group = zeroing(open_group, case, dp=2)
    pairs = [[np.concatenate(x) for x in arrays_of(case.replace(seed=i))] for i in range(2)]
    tokens, ids, weights = (np.stack(pair) for pair in zip(*pairs, strict=True))
    spec = jax.P(AXIS)
    scale = np.ones((2, 2, case.hidden_size), tokens.dtype)

    def body(tokens, ids, weights, scale):
        return reducing_experts(group, "row", False, tokens, ids, weights, scale[0])[None]

    sharded = functools.partial(jax.shard_map, mesh=group.mesh, check_vma=check_vma)
    mapped = jax.vmap(sharded(body, in_specs=spec, out_specs=spec), spmd_axis_name="dp")
    both = jax.P("dp", AXIS)
    unmapped = sharded(
        lambda *args: body(*(x[0] for x in args))[None], in_specs=both, out_specs=both
    )

    def gradients(function):
        def loss(tokens, weights, scale):
            return jnp.sum(function(tokens, ids, weights, scale))

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(tokens, weights, scale)

    for one, other in zip(gradients(mapped), gradients(unmapped), strict=True):
        assert np.any(other)
        assert_same_bits(one, other, "gradient")


def test_groups_that_zero_are_other_groups(transport):
    """A program compiled for one config must not serve the other."""
    config = config_of(CASES["plain"])
    assert config.zero_unused_rows is False
    changed = dataclasses.replace(config, zero_unused_rows=True)
    mesh = make_mesh(4)
    one, other = (jax_ep.ep_init(mesh, AXIS, each, transport) for each in (config, changed))
    assert one != other
