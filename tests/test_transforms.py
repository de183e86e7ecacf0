"""The calls under JAX's transformations, compared with plain jitted calls in bits."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jax_ep
import suite
from harness import (
    AXIS,
    assert_same_bits,
    config_of,
    make_mesh,
    on_mesh,
    on_mesh_eager,
    place,
    shards,
)

CASE = cases.SMALL[4]
N_LAYERS = 3


def make_group(transport, case=CASE, **changes) -> jax_ep.EPGroup:
    config = config_of(case, **changes)
    return jax_ep.ep_init(make_mesh(case.n_ranks), AXIS, config, transport=transport)


def moe(group, tokens, topk_ids, topk_weights):
    """A layer whose experts double their rows, and a residual connection."""
    dispatched = jax_ep.dispatch(group, tokens, topk_ids)
    rows = dispatched.tokens * jnp.bfloat16(2)
    return jax_ep.combine(group, rows, dispatched, topk_weights, residual=tokens)


def operands_of(mesh, case=CASE, n=3) -> list:
    """Gives (tokens, topk_ids, topk_weights) of all ranks; weights without NaN."""
    inputs = suite.make_inputs(case)
    arrays = [*inputs.arrays()[:2], [np.nan_to_num(w) for w in inputs.topk_weights]]
    return [place(mesh, [array]) for array in arrays[:n]]


def assert_all_same(mesh, actual, wanted, what: str) -> None:
    """Compares two trees of arrays of the mesh, in bits."""
    pairs = zip(shards(mesh, actual), shards(mesh, wanted), strict=True)
    for (where, one), (_, other) in pairs:
        leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
        for got, expected in leaves:
            assert_same_bits(got, expected, f"{what}, {where}")


def n_calls(compiled) -> int:
    """Counts the calls that move data in a compiled program: ours, or collectives."""
    ours = r'custom_call_target="[^"]*(?:jax_ep_(?!check)|dispatch|combine)[^"]*"'
    xla = r"= \S+ (?:all-to-all|all-gather|collective-permute|all-reduce)(?:-start)?\("
    text = compiled.as_text()
    return len(re.findall(ours, text)) or len(re.findall(xla, text))


def test_unjitted_calls_give_the_same_bits(transport):
    """Every operation runs by itself, as in a debugger."""
    case = cases.SMALL[2].but(max_tokens=4)
    group = make_group(transport, case)
    operands = operands_of(group.mesh, case)
    layer = functools.partial(moe, group)
    wanted = on_mesh(group.mesh, layer)(*operands)
    got = on_mesh_eager(group.mesh, layer)(*operands)
    assert_all_same(group.mesh, got, wanted, "unjitted")


def layers(group, wrap=lambda layer: layer):
    """Gives (loss of `N_LAYERS` layers, the value and gradients of it)."""
    layer = wrap(functools.partial(moe, group))

    def loss(tokens, topk_ids, topk_weights):
        for _ in range(N_LAYERS):
            # A factor that is exact, however XLA fuses it.
            tokens = layer(tokens, topk_ids, topk_weights) * jnp.bfloat16(0.25)
        return jnp.sum(tokens.astype(jnp.float32))

    return jax.value_and_grad(loss, argnums=(0, 2))


def checkpointed(**options):
    return functools.partial(jax.checkpoint, **options)


NAMES = (jax_ep.DISPATCH_NAME, jax_ep.COMBINE_NAME)


def test_rematerialisation_changes_no_bit_and_a_policy_saves_the_sending(transport):
    group = make_group(transport)
    operands = operands_of(group.mesh)
    keep = jax.checkpoint_policies.save_only_these_names
    variants = {
        "plain": layers(group),
        "again": layers(group, checkpointed()),
        "kept": layers(group, checkpointed(policy=keep(jax_ep.DISPATCH_NAME))),
        "all kept": layers(group, checkpointed(policy=keep(*NAMES))),
    }
    programs = {
        name: on_mesh(group.mesh, body).lower(*operands).compile()
        for name, body in variants.items()
    }
    outs = {name: program(*operands) for name, program in programs.items()}
    for name, out in outs.items():
        assert_all_same(group.mesh, out, outs["plain"], name)
    calls = {name: n_calls(program) for name, program in programs.items()}
    assert calls["plain"] > 0
    assert calls["all kept"] <= calls["kept"] <= calls["again"], calls
    if transport != "xla":  # XLA may merge a collective that is made again
        assert calls["plain"] == calls["kept"] < calls["again"], calls
        assert calls["again"] == calls["plain"] + N_LAYERS, calls


def test_a_call_whose_result_is_unused_is_dropped(transport):
    group = make_group(transport)
    operands = operands_of(group.mesh)

    def body(tokens, topk_ids, topk_weights):
        moe(group, tokens, topk_ids, topk_weights)
        return tokens

    program = on_mesh(group.mesh, body).lower(*operands).compile()
    assert n_calls(program) == 0


def test_a_call_on_a_slice_runs_once(transport):
    """XLA may fuse the slice into a copy of the call: the original must go then."""
    group = make_group(transport)
    tokens, topk_ids, weights = operands_of(group.mesh)

    def body(tokens, topk_ids, weights):
        outs = []
        for half in (slice(0, 8), slice(8, 16)):
            dispatched = jax_ep.dispatch(group, tokens[half], topk_ids[half])
            rows = dispatched.tokens * jnp.bfloat16(2)
            outs.append(jax_ep.combine(group, rows, dispatched, weights[half]))
        return jnp.concatenate(outs)

    run = on_mesh(group.mesh, body).lower(tokens, topk_ids, weights).compile()
    if transport != "xla":
        assert n_calls(run) == 4
    jax.block_until_ready(run(tokens, topk_ids, weights))


def test_scan_gives_the_bits_of_the_unrolled_layers(transport):
    group = make_group(transport)
    operands = operands_of(group.mesh)
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
    assert_all_same(group.mesh, got, wanted, "scan")


def test_scan_of_checkpointed_layers_has_the_unrolled_gradients(transport):
    group = make_group(transport)
    operands = operands_of(group.mesh)

    def scanned(tokens, topk_ids, topk_weights):
        @jax.checkpoint
        def step(tokens, _):
            tokens = moe(group, tokens, topk_ids, topk_weights)
            return tokens * jnp.bfloat16(0.25), None

        tokens, _ = jax.lax.scan(step, tokens, None, length=N_LAYERS)
        return jnp.sum(tokens.astype(jnp.float32))

    got = on_mesh(group.mesh, jax.grad(scanned))(*operands)
    _, (wanted, _) = on_mesh(group.mesh, layers(group))(*operands)
    assert_all_same(group.mesh, got, wanted, "gradient of scan")


@pytest.mark.parametrize("taken", [True, False])
def test_cond_on_a_replicated_predicate_takes_one_branch(taken, transport):
    group = make_group(transport)
    operands = operands_of(group.mesh)
    spec = jax.P(AXIS)

    def body(taken, *operands):
        operands = [x[0] for x in operands]
        out = jax.lax.cond(
            taken, lambda xs: moe(group, *xs), lambda xs: -xs[0], operands
        )
        return out[None]

    run = jax.jit(
        jax.shard_map(
            body, mesh=group.mesh, in_specs=(jax.P(), *[spec] * 3), out_specs=spec
        )
    )
    got = run(jnp.bool_(taken), *operands)
    wanted = on_mesh(group.mesh, functools.partial(moe, group))(*operands)
    assert_all_same(group.mesh, got, wanted if taken else -operands[0], "cond")


def test_donated_tokens_are_consumed_and_the_result_is_right(transport):
    group = make_group(transport)
    layer = functools.partial(moe, group)
    wanted = on_mesh(group.mesh, layer)(*operands_of(group.mesh))
    run = on_mesh(group.mesh, layer, donate_argnums=0)
    for _ in range(3):
        operands = operands_of(group.mesh)
        got = run(*operands)
        assert operands[0].is_deleted()
        assert_all_same(group.mesh, got, wanted, "donated")


def test_vmap_works_or_says_that_it_does_not(transport):
    group = make_group(transport)
    tokens, topk_ids, topk_weights = operands_of(group.mesh)
    layer = functools.partial(moe, group)

    def mapped(tokens, topk_ids, topk_weights):
        both = jnp.stack([tokens, -tokens])
        return jax.vmap(layer, in_axes=(0, None, None))(both, topk_ids, topk_weights)

    def looped(tokens, topk_ids, topk_weights):
        return jnp.stack([layer(x, topk_ids, topk_weights) for x in (tokens, -tokens)])

    operands = (tokens, topk_ids, topk_weights)
    try:
        got = on_mesh(group.mesh, mapped)(*operands)
    except NotImplementedError as error:
        assert "vmap" in str(error)
        assert re.search("lax.map|scan|loop|reshape", str(error))
    else:
        wanted = on_mesh(group.mesh, looped)(*operands)
        assert_all_same(group.mesh, got, wanted, "vmap")


def test_several_groups_stand_side_by_side(transport):
    """Two shapes, two routings, one program; the second group uses the first's rows."""
    other = CASE.but(hidden_size=64, top_k=2, combine_dtype="float32", seed=5)
    first, second = make_group(transport), make_group(transport, other)
    mesh = first.mesh

    def one(tokens, topk_ids, topk_weights):
        return moe(first, tokens, topk_ids, topk_weights)

    def two(tokens, topk_ids, topk_weights):
        dispatched = jax_ep.dispatch(second, tokens, topk_ids)
        rows = dispatched.tokens.astype(jnp.float32)
        return jax_ep.combine(second, rows, dispatched, topk_weights)

    a, b = operands_of(mesh), operands_of(mesh, other)
    got = on_mesh(mesh, lambda a, b: (one(*a), two(*b)))(a, b)
    wanted = (on_mesh(mesh, one)(*a), on_mesh(mesh, two)(*b))
    assert_all_same(mesh, got, wanted, "side by side")


def test_one_group_serves_calls_with_different_numbers_of_tokens(transport):
    mesh = make_mesh(4)
    for n_tokens in (1, 5, CASE.max_tokens):
        suite.check(CASE.but(n_tokens=n_tokens), transport, mesh)


def test_a_dispatched_result_crosses_the_border_of_a_jitted_function(transport):
    """It is a pytree: dispatch in one program, combine in another."""
    group = make_group(transport)
    operands = operands_of(group.mesh)

    def send(tokens, topk_ids, topk_weights):
        return jax_ep.dispatch(group, tokens, topk_ids), tokens, topk_weights

    def bring_back(dispatched, tokens, topk_weights):
        rows = dispatched.tokens * jnp.bfloat16(2)
        return jax_ep.combine(group, rows, dispatched, topk_weights, residual=tokens)

    got = on_mesh(group.mesh, bring_back)(*on_mesh(group.mesh, send)(*operands))
    wanted = on_mesh(group.mesh, functools.partial(moe, group))(*operands)
    assert_all_same(group.mesh, got, wanted, "two programs")
