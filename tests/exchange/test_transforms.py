"""The calls under JAX's transformations, compared bitwise with plain jitted calls."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import cases
import jax_ep
import suite
from harness import AXIS, assert_trees_equal, group_of, make_mesh, on_mesh, on_mesh_eager
from transformed_calls import (
    CASE,
    CHECKPOINTED,
    N_LAYERS,
    both_signs_looped,
    both_signs_mapped,
    layers,
    moe,
    n_calls,
    operands_of,
)


@pytest.fixture
def group(transport):
    return group_of(CASE, transport)


@pytest.fixture
def layer(group):
    return functools.partial(moe, group)


@pytest.fixture
def operands(group):
    return operands_of(group.mesh)


@pytest.mark.thorough
@pytest.mark.usefixtures("program_cache")
def test_calls_without_jit_give_the_same_bits(transport):
    """Every operation runs by itself, as in a debugger."""
    case = cases.SMALL[2].replace(max_tokens=4)
    group = group_of(case, transport)
    operands = operands_of(group.mesh, case)
    layer = functools.partial(moe, group)
    wanted = on_mesh(group.mesh, layer)(*operands)
    got = on_mesh_eager(group.mesh, layer)(*operands)
    assert_trees_equal(group.mesh, got, wanted, "without jit")


@pytest.mark.thorough
def test_rematerialization_gives_the_same_bits_and_policies_save_calls(transport, group, operands):
    programs = {
        name: on_mesh(group.mesh, layers(group, wrap)).compile(*operands)
        for name, wrap in CHECKPOINTED.items()
    }
    outs = {name: program(*operands) for name, program in programs.items()}
    for name, out in outs.items():
        assert_trees_equal(group.mesh, out, outs["plain"], name)
    calls = {name: n_calls(program) for name, program in programs.items()}
    assert calls["plain"] > 0
    assert calls["both saved"] <= calls["dispatch saved"] <= calls["nothing saved"], calls
    if transport != "xla":  # XLA may merge a collective that is repeated
        assert calls["plain"] == calls["dispatch saved"] < calls["nothing saved"], calls
        assert calls["nothing saved"] == calls["plain"] + N_LAYERS, calls


def test_a_call_whose_result_is_unused_is_dropped(group, operands):
    def body(tokens, topk_ids, topk_weights):
        moe(group, tokens, topk_ids, topk_weights)
        return tokens

    program = on_mesh(group.mesh, body).compile(*operands)
    assert n_calls(program) == 0


def test_a_call_on_a_slice_runs_once(transport, group, operands):
    """If XLA fuses the slice into a copy of the call, it must drop the original."""

    def body(tokens, topk_ids, weights):
        outs = []
        for half in (slice(0, 8), slice(8, 16)):
            dispatched = jax_ep.dispatch(group, tokens[half], topk_ids[half])
            rows = dispatched.tokens * jnp.bfloat16(2)
            outs.append(jax_ep.combine(group, rows, dispatched, weights[half]))
        return jnp.concatenate(outs)

    run = on_mesh(group.mesh, body).compile(*operands)
    if transport != "xla":
        assert n_calls(run) == 4
    jax.block_until_ready(run(*operands))


def test_scan_gives_the_bits_of_the_unrolled_layers(group, operands):
    scales = jnp.arange(1, N_LAYERS + 1, dtype=jnp.bfloat16) / 4

    def unrolled(tokens, topk_ids, topk_weights):
        for scale in scales:
            tokens = moe(group, tokens * scale, topk_ids, topk_weights)
        return tokens

    def scanned(tokens, topk_ids, topk_weights):
        def step(tokens, scale):
            return moe(group, tokens * scale, topk_ids, topk_weights), None

        return jax.lax.scan(step, tokens, scales)[0]

    wanted = on_mesh(group.mesh, unrolled)(*operands)
    got = on_mesh(group.mesh, scanned)(*operands)
    assert_trees_equal(group.mesh, got, wanted, "scan")


def test_scan_of_checkpointed_layers_has_the_unrolled_gradients(group, operands):
    def scanned(tokens, topk_ids, topk_weights):
        @jax.checkpoint
        def step(tokens, _):
            tokens = moe(group, tokens, topk_ids, topk_weights)
            return tokens * jnp.bfloat16(0.25), None

        tokens, _ = jax.lax.scan(step, tokens, None, length=N_LAYERS)
        return jnp.sum(tokens.astype(jnp.float32))

    got = on_mesh(group.mesh, jax.grad(scanned))(*operands)
    _, (wanted, _) = on_mesh(group.mesh, layers(group))(*operands)
    assert_trees_equal(group.mesh, got, wanted, "gradient of scan")


@pytest.mark.parametrize("taken", [True, False])
def test_cond_on_a_replicated_predicate_takes_one_branch(taken, group, layer, operands):
    spec = jax.P(AXIS)

    def body(taken, *operands):
        operands = [x[0] for x in operands]
        out = jax.lax.cond(taken, lambda xs: layer(*xs), lambda xs: -xs[0], operands)
        return out[None]

    mapped = jax.shard_map(body, mesh=group.mesh, in_specs=(jax.P(), *[spec] * 3), out_specs=spec)
    got = jax.jit(mapped)(jnp.bool_(taken), *operands)
    wanted = on_mesh(group.mesh, layer)(*operands)
    assert_trees_equal(group.mesh, got, wanted if taken else -operands[0], "cond")


def test_donated_tokens_are_consumed_and_the_result_is_the_same(group, layer):
    wanted = on_mesh(group.mesh, layer)(*operands_of(group.mesh))
    run = on_mesh(group.mesh, layer, donate_argnums=0)
    for _ in range(3):
        operands = operands_of(group.mesh)
        got = run(*operands)
        assert operands[0].is_deleted()
        assert_trees_equal(group.mesh, got, wanted, "donated")


def test_vmap_works_or_says_that_it_does_not(group, layer, operands):
    mapped, looped = (
        on_mesh(group.mesh, functools.partial(body, layer))
        for body in (both_signs_mapped, both_signs_looped)
    )
    try:
        got = mapped(*operands)
    except NotImplementedError as error:
        assert "vmap" in str(error)
        assert re.search("lax.map|scan|loop|reshape", str(error))
    else:
        assert_trees_equal(group.mesh, got, looped(*operands), "vmap")


def test_one_program_may_use_several_groups(transport, group):
    """Two groups of other shapes and routings."""
    other_case = CASE.replace(hidden_size=64, top_k=2, combine_dtype="float32", seed=5)
    mesh, other = group.mesh, group_of(other_case, transport)

    def one(tokens, topk_ids, topk_weights):
        return moe(group, tokens, topk_ids, topk_weights)

    def two(tokens, topk_ids, topk_weights):
        dispatched = jax_ep.dispatch(other, tokens, topk_ids)
        rows = dispatched.tokens.astype(jnp.float32)
        return jax_ep.combine(other, rows, dispatched, topk_weights)

    a, b = operands_of(mesh), operands_of(mesh, other_case)
    got = on_mesh(mesh, lambda a, b: (one(*a), two(*b)))(a, b)
    wanted = (on_mesh(mesh, one)(*a), on_mesh(mesh, two)(*b))
    assert_trees_equal(mesh, got, wanted, "two groups")


@pytest.mark.thorough
def test_one_group_serves_calls_with_different_numbers_of_tokens(transport):
    mesh = make_mesh(4)
    for n_tokens in (1, 5, CASE.max_tokens):
        suite.check(CASE.replace(n_tokens=n_tokens), transport, mesh)


def test_a_dispatched_result_may_leave_a_jitted_function(group, layer, operands):
    """It is a pytree: dispatch is in one program, combine in another."""

    def send(tokens, topk_ids, topk_weights):
        return jax_ep.dispatch(group, tokens, topk_ids), tokens, topk_weights

    def bring_back(dispatched, tokens, topk_weights):
        rows = dispatched.tokens * jnp.bfloat16(2)
        return jax_ep.combine(group, rows, dispatched, topk_weights, residual=tokens)

    got = on_mesh(group.mesh, bring_back)(*on_mesh(group.mesh, send)(*operands))
    wanted = on_mesh(group.mesh, layer)(*operands)
    assert_trees_equal(group.mesh, got, wanted, "two programs")
