"""Callers' mistakes raise while tracing; a missing rank is named in an error."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import cases
import jax_ep
import suite
from harness import AXIS, config_of, make_mesh, on_mesh, place

CASE = cases.SMALL[2]  # E = 8, K = 3, H = 64, M = 16, bfloat16
T, K, H = CASE.n_tokens, CASE.top_k, CASE.hidden_size
BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32


def make_group(transport, **changes) -> jax_ep.EPGroup:
    config = config_of(CASE, **changes)
    return jax_ep.ep_init(make_mesh(2), AXIS, config, transport=transport)


def trace(group, body):
    """Traces a per-rank function; nothing is compiled and nothing runs."""
    jax.eval_shape(on_mesh(group.mesh, lambda _: body()), jnp.zeros(2))


def good(name, group):
    """Gives a valid operand of that name."""
    shapes = {
        "tokens": ((T, H), BF16),
        "topk_ids": ((T, K), I32),
        "topk_weights": ((T, K), F32),
        "expert_out": ((group.max_recv_tokens, H), BF16),
        "residual": ((T, H), BF16),
    }
    return jnp.zeros(*shapes[name])


BAD_DISPATCH = [
    ("tokens", (T, H + 1), BF16),
    ("tokens", (T, H), F32),
    ("tokens", (T * H,), BF16),
    ("tokens", (T + 1, H), BF16),  # more than topk_ids has, and more than M
    ("topk_ids", (T, K + 1), I32),
    ("topk_ids", (T - 1, K), I32),
    ("topk_ids", (T, K), jnp.uint32),
    ("topk_ids", (T, K), F32),
    ("topk_weights", (T, K - 1), F32),
    ("topk_weights", (T, K), BF16),
]


@pytest.mark.parametrize(("name", "shape", "dtype"), BAD_DISPATCH)
def test_dispatch_refuses_wrong_operands(name, shape, dtype, transport):
    group = make_group(transport)
    names = ("tokens", "topk_ids", "topk_weights")
    operands = {n: good(n, group) for n in names} | {name: jnp.zeros(shape, dtype)}
    pattern = "tokens|topk_ids" if shape[0] != T else name
    with pytest.raises(ValueError, match=rf"dispatch.*({pattern})"):
        trace(group, lambda: jax_ep.dispatch(group, **operands).tokens)


def test_dispatch_refuses_more_tokens_than_max_tokens_per_rank(transport):
    group = make_group(transport)
    tokens, ids = jnp.zeros((T + 1, H), BF16), jnp.zeros((T + 1, K), I32)
    with pytest.raises(ValueError, match="max_tokens_per_rank"):
        trace(group, lambda: jax_ep.dispatch(group, tokens, ids).tokens)


BAD_COMBINE = [
    ("expert_out", (10, H), BF16),
    ("expert_out", (CASE.max_tokens * 6, H + 1), BF16),
    ("expert_out", None, F32),
    ("topk_weights", (T, K + 1), F32),
    ("topk_weights", (T, K), BF16),
    ("residual", (T - 1, H), BF16),
    ("residual", (T, H), F32),
]


@pytest.mark.parametrize(("name", "shape", "dtype"), BAD_COMBINE)
def test_combine_refuses_wrong_operands(name, shape, dtype, transport):
    group = make_group(transport)
    operands = {n: good(n, group) for n in ("expert_out", "topk_weights", "residual")}
    operands[name] = jnp.zeros(shape or operands[name].shape, dtype)

    def body():
        dispatched = jax_ep.dispatch(
            group, good("tokens", group), good("topk_ids", group)
        )
        return jax_ep.combine(group, dispatched=dispatched, **operands)

    with pytest.raises(ValueError, match=rf"combine.*{name}"):
        trace(group, body)


@pytest.mark.parametrize(
    ("at_row", "options"),
    [
        (True, {"topk_weights": True}),
        (True, {"reduce": False}),
        (False, {"reduce": False, "topk_weights": True}),
        (False, {"reduce": False, "residual": True}),
    ],
)
def test_combine_refuses_modes_that_exclude_each_other(at_row, options, transport):
    group = make_group(transport)

    def body():
        given = {k: good(k, group) if v else v for k, v in options.items()}
        at = (good("topk_weights", group),) if at_row else ()
        tokens, ids = good("tokens", group), good("topk_ids", group)
        dispatched = jax_ep.dispatch(group, tokens, ids, *at)
        return jax_ep.combine(group, good("expert_out", group), dispatched, **given)

    with pytest.raises(ValueError, match="combine"):
        trace(group, body)


def test_a_call_outside_shard_map_raises(transport):
    group = make_group(transport)
    with pytest.raises(ValueError, match="shard_map"):
        jax_ep.dispatch(group, good("tokens", group), good("topk_ids", group))
    with pytest.raises(ValueError, match="shard_map"):
        jax.jit(lambda x, i: jax_ep.dispatch(group, x, i).tokens)(
            good("tokens", group), good("topk_ids", group)
        )


def test_a_call_with_an_axis_left_to_xla_raises(transport):
    mesh = make_mesh(2, dp=2)
    group = jax_ep.ep_init(mesh, AXIS, config_of(CASE), transport=transport)

    def body(_):
        return jax_ep.dispatch(
            group, good("tokens", group), good("topk_ids", group)
        ).tokens

    spec = jax.P(AXIS)
    partly = jax.shard_map(
        body, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={AXIS}
    )
    with pytest.raises(ValueError, match="manual"):
        jax.eval_shape(jax.jit(partly), jnp.zeros(2))


def test_a_call_over_another_mesh_raises(transport):
    group = make_group(transport)

    def body(_):
        return jax_ep.dispatch(
            group, good("tokens", group), good("topk_ids", group)
        ).tokens

    with pytest.raises(ValueError, match="mesh"):
        jax.eval_shape(on_mesh(make_mesh(4), body), jnp.zeros(4))


@pytest.mark.parametrize("moved", ["ranks", "rows"])
def test_a_call_over_the_devices_in_another_order_raises(moved, transport):
    """On `xla` the mesh of the function is the only one that counts."""
    if transport == "xla":
        pytest.skip("xla takes ranks from the function's mesh")
    mesh = make_mesh(2, dp=2)
    config = config_of(cases.SMALL[2], timeout_s=2.0 + len(moved) / 10)
    group = jax_ep.ep_init(mesh, AXIS, config, transport=transport)
    devices = mesh.devices[:, ::-1] if moved == "ranks" else mesh.devices[::-1]

    def body(_):
        return jax_ep.dispatch(
            group, good("tokens", group), good("topk_ids", group)
        ).tokens

    run = on_mesh(Mesh(devices, mesh.axis_names), body)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Call ep_init with that mesh"):
        jax.block_until_ready(run(jnp.zeros(4)))
        group.check()


def test_a_closed_group_raises(transport):
    group = make_group(transport, timeout_s=9.0)
    group.close()
    with pytest.raises(ValueError, match="closed"):
        trace(
            group,
            lambda: (
                jax_ep.dispatch(
                    group, good("tokens", group), good("topk_ids", group)
                ).tokens
            ),
        )


def test_combine_refuses_what_another_group_dispatched(transport):
    group, other = make_group(transport), make_group(transport, timeout_s=11.0)

    def body():
        tokens, ids = good("tokens", group), good("topk_ids", group)
        dispatched = jax_ep.dispatch(other, tokens, ids)
        return jax_ep.combine(group, good("expert_out", group), dispatched)

    with pytest.raises(ValueError, match="group"):
        trace(group, body)


def test_results_of_a_call_vary_over_the_axis(transport):
    """Typed as equal on all ranks, a result would pass as a replicated output."""
    group = make_group(transport)

    def body(_):
        return jax_ep.dispatch(
            group, good("tokens", group), good("topk_ids", group)
        ).tokens

    replicated = jax.shard_map(
        body, mesh=group.mesh, in_specs=jax.P(AXIS), out_specs=jax.P()
    )
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(jax.jit(replicated), jnp.zeros(2))


def test_a_missing_rank_ends_in_an_error_that_names_it(transport):
    """Rank 1 never calls; the process, and the group's later calls, go on."""
    if transport == "xla":
        pytest.skip("XLA's collectives have their own limit, and abort the process")
    if transport == "p2p":
        pytest.skip("there the group ends, too: see process_checks.py")
    group = make_group(transport, timeout_s=1.0)

    def body(tokens, topk_ids, calls):
        return jax.lax.cond(
            calls[0],
            lambda: jax_ep.dispatch(group, tokens, topk_ids).tokens,
            lambda: jnp.zeros((group.max_recv_tokens, H), BF16) + tokens[0],
        )

    inputs = suite.make_inputs(CASE)
    operands = [place(group.mesh, [x]) for x in inputs.arrays()[:2]]
    run = on_mesh(group.mesh, body)
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"rank.*\b1\b"):
            out = run(*operands, jnp.array([[True], [False]]))
            jax.block_until_ready(out)
        out = run(*operands, jnp.array([[True], [True]]))
        assert np.isfinite(np.asarray(out[0, :1], np.float32)).all()
