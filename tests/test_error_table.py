"""Every row of docs/errors.md: the misuse raises an error of that type with that text."""

import dataclasses
import pathlib
import re
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_ep
from fake_store import FakeClient
from faults import handmade
from harness import on_mesh
from jax_ep.geometry import Geometry, MeshCoordinate
from jax_ep.group import EPGroup
from jax_ep.nnx import MoE
from jax_ep.processes.exchange import Exchange
from jax_ep.processes.meeting import _Ending
from jax_ep.processes.messages import Message
from jax_ep.router import RouterConfig, balance_loss, route
from jax_ep.transports.p2p import P2pConnection
from jax_ep.xla_ffi import extension

pytestmark = pytest.mark.usefixtures("one_process")
TABLE = pathlib.Path(__file__).parents[1] / "docs" / "errors.md"
R, E, K, H, T = 4, 8, 2, 16, 4


@dataclasses.dataclass
class Row:
    """A row of docs/errors.md."""

    id: str
    when: str
    error_type: str
    text: str


def read_table() -> list[Row]:
    row = r'^\| <a id="([a-z-]+)"></a>`(.+?)` \| .+ \| (\w+) \| (\w+) \|$'
    found = re.findall(row, TABLE.read_text(), re.MULTILINE)
    return [Row(id, when, error_type, text) for id, text, when, error_type in found]


def make_mesh(devices=None, shape=(R,), names=("ep",)) -> jax.sharding.Mesh:
    devices = jax.devices()[:R] if devices is None else devices
    return jax.sharding.Mesh(np.array(devices).reshape(shape), names)


def mesh_with_a_device_twice() -> jax.sharding.Mesh:
    devices = jax.devices()[:R]
    return make_mesh([*devices[:-1], devices[0]])


def config(**changes: Any) -> jax_ep.EPConfig:
    values = dict(n_experts=E, top_k=K, hidden_size=H, max_tokens_per_rank=T)
    return jax_ep.EPConfig(**(values | changes))


def init(mesh=None, transport="host", **changes: Any) -> jax_ep.EPGroup:
    mesh = make_mesh() if mesh is None else mesh
    return jax_ep.ep_init(mesh, "ep", config(**changes), transport)


def init_in_memory_of(group: Any) -> jax_ep.EPGroup:
    return jax_ep.ep_init(make_mesh(), "ep", config(), memory_of=group)


def layer(group, **options: Any) -> MoE:
    return MoE(group, H, rngs=nnx.Rngs(0), **options)


def reassigned(layer: MoE, **changes: Any) -> MoE:
    """The layer with another group."""
    layer.group = init(**changes)
    return layer


def run(body: Callable[..., Any], mesh=None, **options: Any) -> Any:
    """Runs a per-rank function on a scalar per rank, and waits for its result."""
    mesh = make_mesh() if mesh is None else mesh
    spec = jax.P("ep")
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, **options)
    ranks = jnp.arange(mesh.shape["ep"])
    return jax.block_until_ready(jax.jit(mapped)(ranks))


def operands(shape=(T, K)) -> tuple[jax.Array, jax.Array]:
    return jnp.ones((T, H), jnp.bfloat16), jnp.zeros(shape, jnp.int32)


def call(group, *, ids=(T, K), mesh=None, **options: Any) -> Any:
    """Runs a dispatch."""
    return run(lambda _: jax_ep.dispatch(group, *operands(shape=ids)).tokens, mesh, **options)


def round_trip(group, change=lambda d: d, dtype=jnp.bfloat16, **options: Any) -> Any:
    """Runs a dispatch, changes its result, and combines it with `options`."""

    def body(rank: jax.Array) -> jax.Array:
        weights = jnp.ones((T, K)) if options.pop("at_dispatch", False) else None
        dispatched = change(jax_ep.dispatch(group, *operands(), weights))
        rows = jnp.zeros((group.max_recv_tokens, H), dtype)
        return jax_ep.combine(group, rows, dispatched, **options)

    return run(body)


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


def set_up(**changes: Any) -> None:
    """One step of opening a group, in process 0 of 2."""
    facts = {"top_k": "2"}
    exchange = Exchange("group", (0, 1), 0, 0.1, facts=facts, **changes)
    exchange.gather("workspaces", lambda: b"address")


def set_up_with(other: bytes, when: str = "0/1") -> None:
    """The same, with what process 1 has written to JAX's store; `when`: step and name of the key"""
    client = FakeClient()
    client.values[f"jax_ep/0-1/open/0/{when}"] = other
    set_up(client=client)


def message(payload: bytes, group: str = "group", step: str = "workspaces") -> bytes:
    return Message(group, step, payload, {"top_k": "8"}).encode()


def given_up(kind: str) -> None:
    """Process 1 has given up before process 0 came."""
    ending = _Ending("group", kind, 1, "process 1 waited 9 s for process 0 (group group, ...")
    set_up_with(ending.encode(), when="0/end")


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


def closed_group() -> jax_ep.EPGroup:
    group = init(timeout_s=40)
    group.close()
    return group


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


def differentiate_codes() -> None:
    group = init(token_format=jax_ep.MXFP8(), hidden_size=128)

    def total(tokens: jax.Array) -> jax.Array:
        return jax_ep.dispatch(group, tokens, operands()[1]).tokens.astype(jnp.float32).sum()

    run(lambda rank: jax.grad(total)(jnp.ones((T, 128)) * rank.astype(jnp.float32)))


def call_over_other_replicas() -> None:
    names, shape = ("dp", "ep"), (2, R // 2)
    group = init(make_mesh(shape=shape, names=names))
    devices = np.roll(np.array(jax.devices()[:R]), R // 2)  # same ranks, other replicas
    call(group, mesh=make_mesh(devices, shape, names))


def call_partly_manual() -> None:
    mesh = make_mesh(shape=(2, 2), names=("dp", "ep"))
    call(init(mesh), mesh=mesh, axis_names={"ep"})


def init_host_of_two_processes() -> None:
    """Pretends that one of the CPU devices belongs to another process."""
    devices = [types.SimpleNamespace(process_index=process) for process in (0, 1)]
    replica = [MeshCoordinate(device, 0, rank) for rank, device in enumerate(devices)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Geometry, "routed_replicas", [replica])
        jax_ep.ep_init(make_mesh(), "ep", config(), transport="host")


def multiply(weights: Any, **options: Any) -> None:
    jax_ep.grouped_matmul(np.ones((2, 8), np.float32), weights, np.uint32([0, 2]), **options)


def quantized_weights(n: int) -> jax_ep.QuantizedWeights:
    return jax_ep.quantize_weights(np.ones((1, 128, n), np.float32))


def multiply_codes(**options: Any) -> None:
    offsets = np.uint32([0, 2])
    rows = jax_ep.fused_silu(jnp.ones((2, 256)), offsets, jax_ep.BlockwiseFP8())
    jax_ep.grouped_matmul(rows, quantized_weights(8), offsets, **options)


def run_experts(token_format: jax_ep.TokenFormat, *weights: Any, **options: Any) -> None:
    group = init(token_format=token_format, hidden_size=128)
    tokens = jnp.ones((T, 128), jnp.bfloat16)

    def layer(rank: jax.Array) -> jax.Array:
        rows = jax_ep.dispatch(group, tokens, operands()[1])
        return jax_ep.expert_mlp(rows, *weights, **options)

    run(layer)


def mlp_weights(
    n_in=128, n_columns=16, dtype=jnp.bfloat16, n_experts=E // R
) -> tuple[jax.Array, jax.Array]:
    """gate_up and down; the dtype is that of down."""
    gate_up = jnp.ones((n_experts, n_in, n_columns), jnp.bfloat16)
    return gate_up, jnp.ones((n_experts, 8, 128), dtype)


TRIGGERS: dict[str, Callable[[], Any]] = {
    "count-type": lambda: config(top_k=2.5),
    "count-range": lambda: config(n_experts=2**40),
    "count-value": lambda: config(hidden_size=0),
    "top-k": lambda: config(top_k=E + 1),
    "format-type": lambda: config(token_format=jnp.bfloat16),
    "format-dtype": lambda: jax_ep.Plain(jnp.int8),
    "block-size": lambda: config(token_format=jax_ep.BlockwiseFP8()),
    "scales-layout": lambda: jax_ep.MXFP8("transposed"),
    "capacity-alignment": lambda: config(
        token_format=jax_ep.BlockwiseFP8(), hidden_size=128, recv_capacity=6
    ),
    "row-alignment": lambda: config(row_alignment=8),
    "combine-dtype": lambda: config(combine_dtype=jnp.float64),
    "timeout-type": lambda: config(timeout_s="soon"),
    "timeout": lambda: config(timeout_s=float("inf")),
    "name": lambda: config(name="decode-1"),
    "config-type": lambda: jax_ep.ep_init(make_mesh(), "ep", None),
    "flag": lambda: config(skip_a2a=0),
    "config-pickle": lambda: object.__new__(jax_ep.EPConfig).__setstate__({"n_expert": 8}),
    "config-empty": lambda: jax_ep.ep_init(make_mesh(), "ep", object.__new__(jax_ep.EPConfig)),
    "exchange-type": lambda: jax_ep.ep_init(make_mesh(), "ep", config(), exchange="store"),
    "mesh-abstract": lambda: jax_ep.ep_init(
        jax.sharding.AbstractMesh((1,), ("ep",)), "ep", config()
    ),
    "mesh-twice": lambda: init(mesh_with_a_device_twice()),
    "mesh-type": lambda: jax_ep.ep_init(jax.devices(), "ep", config()),
    "axis": lambda: jax_ep.ep_init(make_mesh(), "expert", config()),
    "experts": lambda: init(n_experts=6),
    "shared-experts": lambda: init(n_experts=2**31 - R, fused_shared_expert=True),
    "row-numbers": lambda: init(max_tokens_per_rank=2**30),
    "nodes": lambda: init(n_gpus_per_node=2, n_nodes=4),
    "node-counts": lambda: init(n_gpus_per_node=3),
    "transport-name": lambda: init(transport="carrier-pigeon"),
    "transport-mesh": init_host_of_two_processes,
    "memory-type": lambda: init_in_memory_of(make_mesh()),
    "memory-closed": lambda: init_in_memory_of(closed_group()),
    "memory-mesh": lambda: init_in_memory_of(init(make_mesh(jax.devices()[:R][::-1]))),
    "memory-other": lambda: init_in_memory_of(init(n_experts=2 * E)),
    "memory-smaller": lambda: init_in_memory_of(init(max_tokens_per_rank=T - 1)),
    "setup-missing": lambda: set_up(client=FakeClient()),
    "setup-late": lambda: given_up("timeout"),
    "setup-failed": lambda: set_up(custom=lambda _, mine: [mine, message(b"-no memory")]),
    "setup-other": lambda: set_up_with(message(b"+", group="other")),
    "setup-gave-up": lambda: given_up("failure"),
    "setup-garbage": lambda: set_up_with(b"garbage"),
    "setup-exchange": lambda: set_up(custom=lambda _, mine: [mine]),
    "setup-exchange-type": lambda: set_up(custom=lambda *_: None),
    "setup-exchange-garbage": lambda: set_up(custom=lambda _, mine: [mine, b"garbage"]),
    "group-type": lambda: call("ep"),
    "outside": lambda: jax_ep.dispatch(init(), *operands()),
    "partly-manual": call_partly_manual,
    "other-mesh": lambda: call(init(), mesh=make_mesh(shape=(2, 2), names=("dp", "ep"))),
    "closed": lambda: call(closed_group()),
    "shape": lambda: call(init(), ids=(T, K + 1)),
    "dtype": lambda: round_trip(init(), dtype=jnp.float32),
    "none": lambda: dispatch_ids(None),
    "not-array": lambda: dispatch_ids("ids"),
    "leading": lambda: dispatch_ids(np.zeros((2, T // 2, K), np.int32)),
    "values-dtype": lambda: send_along(jnp.zeros((T, H), jnp.float32)),
    "values-integers": lambda: send_along(jnp.zeros((T, 5), jnp.int32)),
    "integer-ids": lambda: dispatch_ids(np.zeros((T, K), np.float32)),
    "float-weights": lambda: round_trip(init(), topk_weights=np.ones((T, K), np.int32)),
    "swapped": lambda: run(
        lambda r: jax_ep.dispatch(init(), operands()[0], jnp.ones((T, K)), operands()[1]).tokens
    ),
    "codes": lambda: run(
        lambda r: jax_ep.dispatch(init(), jnp.ones((T, H), jnp.float8_e4m3fn), operands()[1]).tokens
    ),
    "not-codes": dispatch_numbers_as_codes,
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
    "quantize-dtype": lambda: jax_ep.MXFP8().quantize(jnp.ones((T, 128), jnp.int32)),
    "quantized-dtype": lambda: run(
        lambda r: (
            jax_ep.dispatch(
                init(token_format=jax_ep.NVFP4()), jnp.ones((T, H), jnp.float16), r
            ).tokens
        )
    ),
    "dequantize-dtype": lambda: round_trip(init(), lambda d: jax_ep.dequantize(d, jnp.int32)),
    "dequantize-type": lambda: round_trip(init(), lambda d: jax_ep.dequantize(d.tokens)),
    "silu-columns": lambda: jax_ep.fused_silu(jnp.ones((2, 3)), np.uint32([0, 2])),
    "silu-input-scales": lambda: jax_ep.fused_silu(
        jnp.ones((2, 4)), np.uint32([0, 2]), input_scales=jnp.ones(1)
    ),
    "silu-format": lambda: jax_ep.fused_silu(jnp.ones((2, 4)), np.uint32([0, 2]), "mxfp8"),
    "silu-clamp": lambda: jax_ep.fused_silu(
        jnp.ones((2, 4)), np.uint32([0, 2]), clamp=(1.0, np.inf)
    ),
    "silu-interleaved": lambda: jax_ep.fused_silu(
        jnp.ones((2, 4)), np.uint32([0, 2]), interleaved=1
    ),
    "silu-groups": lambda: jax_ep.fused_silu(jnp.ones((2, 4)), np.uint32([])),
    "silu-gradient": lambda: jax.grad(
        lambda x: (
            jax_ep.fused_silu(x, np.uint32([0, 2]), jax_ep.MXFP8(), clamp=(1.0, 7.0))
            .tokens.astype(jnp.float32)
            .sum()
        )
    )(jnp.ones((2, 64))),
    "codes-gradient": differentiate_codes,
    "silu-offsets": lambda: jax.block_until_ready(
        jax_ep.fused_silu(jnp.ones((2, 4)), np.uint32([0, 3]))
    ),
    "matmul-shape": lambda: multiply(np.ones((2, 8, 4), np.float32)),
    "matmul-dtype": lambda: multiply(np.ones((1, 8, 4), jnp.bfloat16)),
    "matmul-result": lambda: multiply(np.ones((1, 8, 4), np.float32), dtype=jnp.bfloat16),
    "matmul-groups": lambda: jax_ep.grouped_matmul(jnp.ones((2, 8)), [], np.uint32([])),
    "matmul-codes": lambda: multiply(quantized_weights(8)),
    "matmul-format": lambda: multiply_codes(token_format=jax_ep.MXFP8()),
    "matmul-options": lambda: multiply_codes(transposed=True),
    "matmul-flag": lambda: multiply(np.ones((1, 8, 4), np.float32), transposed=None),
    "weights-block": lambda: jax_ep.quantize_weights(np.ones((1, 8, 4), np.float32)),
    "mlp-type": lambda: jax_ep.expert_mlp(jnp.ones((2, 8)), None, None),
    "mlp-weights": lambda: run_experts(jax_ep.BF16(), quantized_weights(128), jnp.ones(3)),
    "mlp-shape": lambda: run_experts(jax_ep.BF16(), *mlp_weights(n_in=64)),
    "mlp-halves": lambda: run_experts(jax_ep.BF16(), *mlp_weights(n_columns=8)),
    "mlp-sizes": lambda: run_experts(jax_ep.BF16(), *mlp_weights(n_columns=24)),
    "mlp-dtype": lambda: run_experts(jax_ep.BF16(), *mlp_weights(dtype=jnp.float32)),
    "mlp-columns": lambda: run_experts(jax_ep.BF16(), *mlp_weights(n_columns=15)),
    "mlp-clamp": lambda: run_experts(jax_ep.BF16(), *mlp_weights(), clamp=(1.0, -1.0)),
    "mlp-format": lambda: run_experts(jax_ep.MXFP8(), *[quantized_weights(128)] * 2),
    "mlp-experts": lambda: run_experts(jax_ep.BF16(), *mlp_weights(n_experts=E)),
    "mlp-flag": lambda: run_experts(jax_ep.BF16(), *mlp_weights(), transposed=1),
    "mlp-transposed": lambda: run_experts(
        jax_ep.BlockwiseFP8(), *[quantized_weights(128)] * 2, transposed=True
    ),
    "router-value": lambda: RouterConfig(scores="relu"),
    "router-groups": lambda: RouterConfig(topk_expert_groups=2),
    "router-division": lambda: route(RouterConfig(n_expert_groups=3), jnp.ones((T, E)), K),
    "router-pairs": lambda: route(
        RouterConfig(n_expert_groups=E, group_scores="top2"), jnp.ones((T, E)), K
    ),
    "router-choices": lambda: route(RouterConfig(n_expert_groups=E), jnp.ones((T, E)), K),
    "router-scaling": lambda: RouterConfig(scaling=float("inf")),
    "router-type": lambda: route(None, jnp.ones((T, E)), K),
    "router-shape": lambda: balance_loss(jnp.ones((T, E)), jnp.zeros((T + 1, K), jnp.int32)),
    "router-dtype": lambda: route(RouterConfig(), jnp.ones((T, E), jnp.int32), K),
    "layer-axes": lambda: layer(init(), token_axes=()),
    "layer-fsdp": lambda: layer(init(), fsdp_axis="ep"),
    "layer-fsdp-size": lambda: layer(
        init(make_mesh(jax.devices()[:6], (3, 2), ("dp", "ep"))), fsdp_axis="dp"
    ),
    "layer-arguments": lambda: layer(init(), router="softmax"),
    "layer-dtype": lambda: layer(init(), param_dtype=jnp.int32),
    "layer-shared": lambda: layer(init(fused_shared_expert=True), shared_size=2 * H),
    "layer-capacity": lambda: layer(init(), capacity_factor=0),
    "layer-tokens": lambda: layer(init())(jnp.ones((R, H + 1))),
    "layer-tokens-dtype": lambda: layer(init())(jnp.ones((R, H), jnp.int32)),
    "layer-mask-dtype": lambda: layer(init())(jnp.ones((R, H)), jnp.ones(R, jnp.int32)),
    "layer-array": lambda: layer(init())([1.0]),
    "layer-inside": lambda: run(lambda rank: layer(init())(jnp.ones((R, H)))),
    "layer-mask": lambda: layer(init())(jnp.ones((R, 2, H)), jnp.ones(R, bool)),
    "layer-group": lambda: reassigned(layer(init()), combine_dtype=jnp.float32)(jnp.ones((R, H))),
    "layer-fused": lambda: reassigned(layer(init()), fused_shared_expert=True)(jnp.ones((R, H))),
    "layer-bias": lambda: layer(init()).update_bias(jnp.ones(E)),
    "gpu-platform": lambda: init(transport="p2p"),
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


def test_each_row_of_the_table_has_a_trigger():
    ids = [row.id for row in read_table()]
    assert len(ids) > 30
    assert sorted(ids) == sorted(TRIGGERS)


@pytest.mark.parametrize("row", read_table(), ids=lambda row: row.id)
def test_misuse_raises_what_the_table_says(row):
    with pytest.raises(Exception) as caught:  # noqa: PT011 (type and text follow)
        TRIGGERS[row.id]()
    assert type(caught.value).__name__ == row.error_type, caught.value
    pattern = ".*".join(re.escape(part) for part in row.text.split("…"))
    assert re.search(pattern, str(caught.value), re.DOTALL), caught.value


def test_the_process_survives_a_failed_run():
    """All ranks serve the next call: the one that failed, and those that it took down."""
    for trigger in ("failed-rank", "missing-rank", "changed-handle"):
        with pytest.raises(jax.errors.JaxRuntimeError):
            TRIGGERS[trigger]()
        out = call(init(timeout_s=30))
        assert np.all(np.asarray(out[:T], np.float32) == 1)
