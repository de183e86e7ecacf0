"""Callers' mistakes raise while tracing; if a rank is missing, the error names it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import cases
import jax_ep
import suite
from harness import AXIS, group_of, make_mesh, on_mesh, put

CASE = cases.SMALL[2]  # E = 8, K = 3, H = 64, M = 16, bfloat16
T, K, H = CASE.n_tokens, CASE.top_k, CASE.hidden_size
BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32


def make_group(transport, **changes) -> jax_ep.EPGroup:
    return group_of(CASE, transport, **changes)


def trace(group, body, mesh=None):
    """Traces a per-rank function without operands; compiles and runs nothing."""
    mesh = group.mesh if mesh is None else mesh
    jax.eval_shape(on_mesh(mesh, lambda _: body()), jnp.zeros(mesh.size))


def valid(name, group):
    """A valid operand of that name."""
    shapes = {
        "tokens": ((T, H), BF16),
        "topk_ids": ((T, K), I32),
        "topk_weights": ((T, K), F32),
        "expert_out": ((group.max_recv_tokens, H), BF16),
        "residual": ((T, H), BF16),
    }
    return jnp.zeros(*shapes[name])


def dispatch(group, *names):
    """A dispatch of valid operands; `names` are those of optional ones."""
    operands = (valid(name, group) for name in ("tokens", "topk_ids", *names))
    return jax_ep.dispatch(group, *operands)


INVALID_FOR_DISPATCH = [
    ("tokens", (T, H + 1), BF16),
    ("tokens", (T, H), F32),
    ("tokens", (T * H,), BF16),
    ("tokens", (T + 1, H), BF16),  # more than topk_ids has, and more than M
    ("topk_ids", (T, K + 1), I32),
    ("topk_ids", (T - 1, K), I32),
    ("topk_ids", (1, T, K), I32),
    ("topk_ids", (T, K), F32),
    ("topk_ids", (T, K), jnp.bool_),
    ("topk_weights", (T, K - 1), F32),
    ("topk_weights", (T, 1, K), F32),
    ("topk_weights", (T, K), I32),
]


@pytest.mark.parametrize(("name", "shape", "dtype"), INVALID_FOR_DISPATCH)
def test_dispatch_rejects_invalid_operands(name, shape, dtype, transport):
    group = make_group(transport)
    names = ("tokens", "topk_ids", "topk_weights")
    operands = {n: valid(n, group) for n in names} | {name: jnp.zeros(shape, dtype)}
    pattern = "tokens|topk_ids" if shape[0] != T else name
    with pytest.raises(ValueError, match=rf"dispatch.*({pattern})"):
        trace(group, lambda: jax_ep.dispatch(group, **operands).tokens)


def test_dispatch_rejects_more_than_max_tokens_per_rank(transport):
    group = make_group(transport)
    tokens, ids = jnp.zeros((T + 1, H), BF16), jnp.zeros((T + 1, K), I32)
    with pytest.raises(ValueError, match="max_tokens_per_rank"):
        trace(group, lambda: jax_ep.dispatch(group, tokens, ids).tokens)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_group_that_an_error_advises_takes_the_tokens(dtype, transport):
    group, tokens = make_group(transport), jnp.zeros((T, H), dtype)

    def body():
        return jax_ep.dispatch(group, tokens, valid("topk_ids", group)).tokens

    with pytest.raises(ValueError, match="tokens must be bfloat16") as caught:
        trace(group, body)
    (advice,) = re.findall(r"EPConfig\(\.\.\., (.*)\)\.$", str(caught.value))
    group = make_group(transport, **eval(f"dict({advice})", {"jax_ep": jax_ep}))
    trace(group, body)


INVALID_FOR_COMBINE = [
    ("expert_out", (10, H), BF16),
    ("expert_out", (CASE.max_tokens * 6, H + 1), BF16),
    ("expert_out", None, F32),
    ("topk_weights", (T, K + 1), F32),
    ("topk_weights", (T, K), I32),
    ("residual", (T - 1, H), BF16),
    ("residual", (1, T, H), BF16),
    ("residual", (T, H), F32),
]


@pytest.mark.parametrize(("name", "shape", "dtype"), INVALID_FOR_COMBINE)
def test_combine_rejects_invalid_operands(name, shape, dtype, transport):
    group = make_group(transport)
    operands = {n: valid(n, group) for n in ("expert_out", "topk_weights", "residual")}
    operands[name] = jnp.zeros(shape or operands[name].shape, dtype)

    def body():
        return jax_ep.combine(group, dispatched=dispatch(group), **operands)

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
def test_combine_rejects_modes_that_exclude_each_other(at_row, options, transport):
    group = make_group(transport)

    def body():
        given = {k: valid(k, group) if v else v for k, v in options.items()}
        dispatched = dispatch(group, *(["topk_weights"] if at_row else []))
        return jax_ep.combine(group, valid("expert_out", group), dispatched, **given)

    with pytest.raises(ValueError, match="combine"):
        trace(group, body)


def test_a_call_outside_shard_map_raises(transport):
    group = make_group(transport)
    with pytest.raises(ValueError, match="shard_map"):
        dispatch(group)
    call = jax.jit(lambda x, i: jax_ep.dispatch(group, x, i).tokens)
    with pytest.raises(ValueError, match="shard_map"):
        call(valid("tokens", group), valid("topk_ids", group))


def test_a_call_with_an_axis_left_to_xla_raises(transport):
    mesh, spec = make_mesh(2, dp=2), jax.P(AXIS)
    group = group_of(CASE, transport, mesh)
    partly_manual = jax.shard_map(
        lambda _: dispatch(group).tokens,
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        axis_names={AXIS},
    )
    with pytest.raises(ValueError, match="manual"):
        jax.eval_shape(jax.jit(partly_manual), jnp.zeros(2))


def test_a_call_over_another_mesh_raises(transport):
    group = make_group(transport)
    with pytest.raises(ValueError, match="mesh"):
        trace(group, lambda: dispatch(group).tokens, make_mesh(4))


@pytest.mark.parametrize("moved", ["ranks", "replicas"])
def test_a_call_over_the_devices_in_another_order_raises(moved, transport):
    """On `xla`, only the mesh of the function counts."""
    if transport == "xla":
        pytest.skip("xla takes ranks from the function's mesh")
    mesh = make_mesh(2, dp=2)
    timeout_s = 2.0 + len(moved) / 10  # of this test's own group, which fails
    group = group_of(CASE, transport, mesh, timeout_s=timeout_s)
    devices = mesh.devices[:, ::-1] if moved == "ranks" else mesh.devices[::-1]
    run = on_mesh(Mesh(devices, mesh.axis_names), lambda _: dispatch(group).tokens)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Call ep_init with that mesh"):
        jax.block_until_ready(run(jnp.zeros(4)))
        group.check()


def test_a_call_of_a_closed_group_raises(transport):
    group = make_group(transport, timeout_s=9.0)
    group.close()
    with pytest.raises(ValueError, match="closed"):
        trace(group, lambda: dispatch(group).tokens)


def test_combine_rejects_what_another_group_dispatched(transport):
    group, other = make_group(transport), make_group(transport, timeout_s=11.0)

    def body():
        return jax_ep.combine(group, valid("expert_out", group), dispatch(other))

    with pytest.raises(ValueError, match="group"):
        trace(group, body)


def test_results_of_a_call_vary_over_the_axis(transport):
    """If they were typed as equal on all ranks, JAX would take them as replicated outputs."""
    group = make_group(transport)
    replicated = jax.shard_map(
        lambda _: dispatch(group).tokens, mesh=group.mesh, in_specs=jax.P(AXIS), out_specs=jax.P()
    )
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(jax.jit(replicated), jnp.zeros(2))


@pytest.mark.parametrize("timeout_s", [1e-12, 5e-9])
def test_the_shortest_time_limits_end_calls(timeout_s, transport):
    if transport != "host":
        pytest.skip("the limit is that of the watchdog of host")
    group = make_group(transport, timeout_s=timeout_s)

    def body(tokens, topk_ids, calls):
        def dispatch():
            return jax_ep.dispatch(group, tokens, topk_ids).n_dropped + 0 * calls.astype(np.int32)

        return jax.lax.cond(calls[0], dispatch, lambda: calls.astype(np.int32))

    operands = put(group.mesh, *suite.make_inputs(CASE).arrays()[:2])
    with pytest.raises(jax.errors.JaxRuntimeError, match="waited"):
        jax.block_until_ready(on_mesh(group.mesh, body)(*operands, jnp.array([[True], [False]])))


def test_the_error_names_a_missing_rank(transport):
    """Rank 1 skips a call; the process goes on, and the group's later calls succeed."""
    if transport == "xla":
        pytest.skip("XLA's collectives have a time limit of their own, and abort the process")
    if transport == "p2p":
        pytest.skip("a group of p2p does not recover from a failure: see process_checks.py")
    group = make_group(transport, timeout_s=1.0)

    def body(tokens, topk_ids, calls):
        return jax.lax.cond(
            calls[0],
            lambda: jax_ep.dispatch(group, tokens, topk_ids).tokens,
            lambda: jnp.zeros((group.max_recv_tokens, H), BF16) + tokens[0],
        )

    operands = put(group.mesh, *suite.make_inputs(CASE).arrays()[:2])
    run = on_mesh(group.mesh, body)
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"rank.*\b1\b"):
            jax.block_until_ready(run(*operands, jnp.array([[True], [False]])))
        out = run(*operands, jnp.array([[True], [True]]))
        assert np.isfinite(np.asarray(out[0, :1], np.float32)).all()
