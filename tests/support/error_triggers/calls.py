"""Misuses of dispatch, combine and redispatch, and calls that fail as they run."""

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep
from error_triggers.base import (
    E,
    H,
    K,
    R,
    T,
    closed_group,
    config,
    init,
    make_mesh,
    operands,
    round_trip,
    run,
)
from faults import handmade
from harness import on_mesh, succeed_in_callbacks
from jax_ep.ffi import extension
from jax_ep.geometry import Geometry
from jax_ep.group import EPGroup
from jax_ep.transports.p2p import P2pConnection


def call(group, *, ids=(T, K), mesh=None, **options: Any) -> Any:
    """Runs a dispatch."""
    return run(lambda _: jax_ep.dispatch(group, *operands(shape=ids)).tokens, mesh, **options)


def send_along(values: jax.Array) -> None:
    """Runs a redispatch."""
    group = init()
    run(lambda _: jax_ep.redispatch(group, values, jax_ep.dispatch(group, *operands())))


def wait_for_wrong_call(group, wait, start, other=None) -> Any:
    """Passes to `wait` what `start` returned for another operation or another group."""
    return run(lambda _: wait(group, start(other or group, *operands())).tokens)


def call_after_close() -> None:
    with init(timeout_s=50) as group:
        dispatch = on_mesh(group.mesh, lambda _: jax_ep.dispatch(group, *operands()).tokens)
        jax.block_until_ready(dispatch(jnp.arange(R)))
    jax.block_until_ready(dispatch(jnp.arange(R)))


def call_with_failing_rank() -> None:
    group = init(timeout_s=30)
    extension.load_host().fail_next_call(group.key, jax.devices()[3].id, "out of memory")
    call(group)


def call_without_rank_3() -> None:
    group = init(timeout_s=0.5)

    def body(rank: jax.Array) -> jax.Array:
        return jax.lax.cond(
            rank[0] == 3,
            lambda: jax.lax.pcast(jnp.zeros(1), "ep", to="varying"),
            lambda: jax_ep.dispatch(group, *operands()).tokens[:1, 0].astype(float),
        )

    run(body)


def call_in_two_branches() -> None:
    """Rank 3 dispatches twice as many tokens as the others, in another branch."""
    group = init(timeout_s=0.5)

    def dispatch(n: int) -> jax.Array:
        tokens, ids = operands()
        return jax_ep.dispatch(group, tokens[:n], ids[:n]).tokens[:1, 0].astype(float)

    run(lambda rank: jax.lax.cond(rank[0] == 3, lambda: dispatch(T), lambda: dispatch(T // 2)))


def change_handle() -> None:
    group = init()
    round_trip(group, lambda d: dataclasses.replace(d, handle=d.handle + 10_000))


def change_offsets() -> None:
    group = init(row_alignment=4)

    def loss(rows: jax.Array) -> jax.Array:
        dispatched = jax_ep.dispatch(group, *operands())
        changed = dispatched.row_offsets + jnp.uint32(10_000)
        dispatched = dataclasses.replace(dispatched, row_offsets=changed)
        return jax_ep.combine(group, rows, dispatched).astype(jnp.float32).sum()

    rows = jnp.zeros((group.max_recv_tokens, H), jnp.bfloat16)
    run(lambda _: jax.grad(loss)(jax.lax.pcast(rows, "ep", to="varying")))


def run_handmade(target: str, edit: Callable[[Any], None]) -> None:
    """Runs a layer whose call of that target was changed by hand."""
    group = init()

    def body(tokens: jax.Array) -> jax.Array:
        dispatched = jax_ep.dispatch(group, tokens, operands()[1])
        return jax_ep.combine(group, dispatched.tokens, dispatched)

    tokens = jnp.ones((R * T, H), jnp.bfloat16)
    mapped = jax.shard_map(body, mesh=group.mesh, in_specs=jax.P("ep"), out_specs=jax.P("ep"))
    lowered = jax.jit(mapped).lower(tokens)
    (call,) = handmade.calls(lowered, target)
    edit(call)
    jax.block_until_ready(lowered.compile()(tokens))


def in_another_function(use: Callable[[EPGroup, Any], Any]) -> None:
    """Traced for `p2p`, though it cannot serve these devices."""
    group = EPGroup(P2pConnection(Geometry(make_mesh(), "ep", config(), "p2p")))

    def body(rank: jax.Array) -> jax.Array:
        in_flight = jax_ep.dispatch_async(group, *operands())
        return jax.jit(lambda x: x + use(group, in_flight))(rank)

    run(body)


def wait_in_another_function() -> None:
    in_another_function(lambda group, call: jax_ep.dispatch_wait(group, call).n_dropped)


def overlap_in_another_function() -> None:
    in_another_function(lambda _, call: call.overlap(jnp.sin, jnp.ones(())))


def dispatch_ids(topk_ids: Any) -> None:
    run(lambda rank: jax_ep.dispatch(init(), operands()[0], topk_ids).tokens)


def dispatch_numbers_as_codes() -> None:
    group = init(token_format=jax_ep.BlockwiseFP8(), hidden_size=128)
    tokens = jax_ep.Quantized(jnp.ones((T, 128), jnp.bfloat16), jnp.ones((T, 1)))
    run(lambda rank: jax_ep.dispatch(group, tokens, operands()[1]).tokens)


def call_over_other_replicas() -> None:
    names, shape = ("dp", "ep"), (2, R // 2)
    group = init(make_mesh(shape=shape, names=names))
    devices = np.roll(np.array(jax.devices()[:R]), R // 2)  # same ranks, other replicas
    call(group, mesh=make_mesh(devices, shape, names))


def call_partly_manual() -> None:
    mesh = make_mesh(shape=(2, 2), names=("dp", "ep"))
    call(init(mesh), mesh=mesh, axis_names={"ep"})


def drop_rows() -> None:
    """All choices are of expert 0."""
    try:
        round_trip(init(name="train", recv_capacity=1, on_drop="raise"))
    finally:
        succeed_in_callbacks()


def call_in_fork():
    """As if another process had opened the group."""
    with init(timeout_s=38) as group, mock.patch.object(group, "_process", 0):
        call(group)


TRIGGERS: dict[str, Callable[[], Any]] = {
    "group-type": lambda: call("ep"),
    "outside": lambda: jax_ep.dispatch(init(), *operands()),
    "partly-manual": call_partly_manual,
    "other-mesh": lambda: call(init(), mesh=make_mesh(shape=(2, 2), names=("dp", "ep"))),
    "closed": lambda: call(closed_group()),
    "forked": call_in_fork,
    "shape": lambda: call(init(), ids=(T, K + 1)),
    "dtype": lambda: round_trip(init(), dtype=jnp.float32),
    "tokens-dtype": lambda: run(
        lambda r: jax_ep.dispatch(init(), jnp.ones((T, H)), operands()[1]).tokens
    ),
    "none": lambda: dispatch_ids(None),
    "not-array": lambda: dispatch_ids("ids"),
    "leading": lambda: dispatch_ids(np.zeros((2, T // 2, K), np.int32)),
    "values-dtype": lambda: send_along(jnp.zeros((T, H), jnp.float32)),
    "values-integers": lambda: send_along(jnp.zeros((T, 5), jnp.int32)),
    "integer-ids": lambda: dispatch_ids(np.zeros((T, K), np.float32)),
    "random-key": lambda: dispatch_ids(jax.random.split(jax.random.key(0), (T, K))),
    "float-weights": lambda: round_trip(init(), topk_weights=np.ones((T, K), np.int32)),
    "swapped": lambda: run(
        lambda r: jax_ep.dispatch(init(), operands()[0], jnp.ones((T, K)), operands()[1]).tokens
    ),
    "codes": lambda: run(
        lambda r: jax_ep.dispatch(init(), jnp.ones((T, H), jnp.float8_e4m3fn), operands()[1]).tokens
    ),
    "not-codes": dispatch_numbers_as_codes,
    "drops": drop_rows,
    "too-many-tokens": lambda: call(init(max_tokens_per_rank=T - 1)),
    "input-scale": lambda: run(
        lambda r: jax_ep.dispatch(init(), *operands(), input_scale=jnp.ones(1)).tokens
    ),
    "input-scale-value": lambda: run(
        lambda r: (
            jax_ep.dispatch(
                init(token_format=jax_ep.NVFP4()), *operands(), input_scale=jnp.ones(2)
            ).tokens
        )
    ),
    "quantized-dtype": lambda: run(
        lambda r: (
            jax_ep.dispatch(
                init(token_format=jax_ep.NVFP4()), jnp.ones((T, H), jnp.float16), r
            ).tokens
        )
    ),
    "weights-twice": lambda: round_trip(init(), at_dispatch=True, topk_weights=jnp.ones((T, K))),
    "unreduced-weights": lambda: round_trip(init(), reduce=False, topk_weights=jnp.ones((T, K))),
    "reduce-type": lambda: round_trip(init(), reduce="no"),
    "dispatched-type": lambda: round_trip(init(), lambda d: d.tokens),
    "dispatched-group": lambda: round_trip(
        init(), lambda d: dataclasses.replace(d, group=init(timeout_s=3))
    ),
    "wait-type": lambda: wait_for_wrong_call(init(), jax_ep.combine_wait, jax_ep.dispatch_async),
    "wait-group": lambda: wait_for_wrong_call(
        init(), jax_ep.dispatch_wait, jax_ep.dispatch_async, init(timeout_s=3)
    ),
    "wait-elsewhere": wait_in_another_function,
    "overlap-elsewhere": overlap_in_another_function,
    "no-stats": lambda: init(transport="xla").stats(),
    "mixed-stats": lambda: jax_ep.plot_traffic(init().stats() + init(n_experts=2 * E).stats()),
    "closed-stats": lambda: closed_group().stats(),
    "closed-at-run": call_after_close,
    "other-devices": lambda: call(init(), mesh=make_mesh(jax.devices()[R : 2 * R])),
    "other-order": lambda: call(init(), mesh=make_mesh(jax.devices()[:R][::-1])),
    "other-replicas": call_over_other_replicas,
    "changed-handle": change_handle,
    "changed-offsets": change_offsets,
    "changed-attribute": lambda: run_handmade(
        "jax_ep_combine", lambda call: handmade.set_attribute(call, "weighting", "3 : i32")
    ),
    "changed-operands": lambda: run_handmade(
        "jax_ep_dispatch", lambda call: handmade.set_operands(call, list(call.operands)[:2])
    ),
    "shared-memory": lambda: run_handmade(
        "jax_ep_dispatch", lambda call: handmade.alias(call, operand=2, result=5)
    ),
    "failed-rank": call_with_failing_rank,
    "missing-rank": call_without_rank_3,
    "other-branch": call_in_two_branches,
}
