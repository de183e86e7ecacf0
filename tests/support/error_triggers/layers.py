"""Misuses of what a layer does with rows: formats, experts, routers, nnx.MoE."""

import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_ep
from error_triggers.base import E, H, K, R, T, init, make_mesh, operands, round_trip, run
from harness import succeed_in_callbacks
from jax_ep.nnx import MoE
from jax_ep.router import RouterConfig, Routes, balance_loss, route


def quantized(**changes: jax.Array) -> jax_ep.Quantized:
    return jax_ep.MXFP8().quantize(jnp.ones((T, 128)))._replace(**changes)


def layer(group, **options: Any) -> MoE:
    return MoE(group, H, rngs=nnx.Rngs(0), **options)


def reassigned(layer: MoE, **changes: Any) -> MoE:
    """The layer with another group."""
    layer.group = init(**changes)
    return layer


def routed(routes: Any) -> None:
    """A call of a layer whose router returns that."""
    layer(init(), router_fn=lambda *_: routes)(jnp.ones((R, H)))


def on_explicit_axes(shape: tuple[int, int], *specs: jax.P, **options: Any) -> None:
    """A call with tokens, or tokens and a mask, with shardings that their types say."""
    mesh = jax.make_mesh(
        (R,), ("ep",), (jax.sharding.AxisType.Explicit,), devices=jax.devices()[:R]
    )
    arrays = jnp.ones(shape), jnp.ones(shape[:1], bool)
    puts = [
        jax.device_put(x, jax.NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=False)
    ]
    layer(init(mesh), **options)(*puts)


def fp8_layer(mesh: jax.sharding.Mesh | None = None, **options: Any) -> MoE:
    group = init(mesh, token_format=jax_ep.BlockwiseFP8(), hidden_size=128)
    return MoE(group, 128, fp8_matmuls=True, rngs=nnx.Rngs(0), **options)


def quantize_twice() -> None:
    quantized = fp8_layer()
    quantized.quantize_experts()
    quantized.quantize_experts()


def run_layer(layer: MoE) -> None:
    """All tokens choose the same experts."""
    try:
        jax.block_until_ready(nnx.jit(lambda layer, x: layer(x))(layer, jnp.ones((R * T, H))))
    finally:
        succeed_in_callbacks()


def multiply(weights: Any, **options: Any) -> None:
    jax_ep.grouped_matmul(np.ones((2, 8), np.float32), weights, np.uint32([0, 2]), **options)


def multiply_activated() -> None:
    """Numbers in float32, but without the token format that keeps them so."""
    offsets = np.uint32([0, 2])
    values = jax_ep.fused_silu(jnp.ones((2, 16)), offsets)
    jax_ep.grouped_matmul(values, jnp.ones((1, 8, 4)), offsets)


def add_gradient(n_rows: int = 2, n: int = 4, dtype: Any = np.float32) -> None:
    rows, cotangent = np.ones((2, 8), np.float32), np.ones((n_rows, 4), np.float32)
    accumulator = jnp.zeros((1, 8, n), dtype)
    jax_ep.grouped_matmul_gradient(rows, cotangent, np.uint32([0, 2]), accumulator)


def quantized_weights(n: int) -> jax_ep.QuantizedWeights:
    return jax_ep.quantize_weights(np.ones((1, 128, n), np.float32))


def row_codes(offsets: Any) -> Any:
    return jax_ep.fused_silu(jnp.ones((2, 256)), offsets, jax_ep.BlockwiseFP8())


def multiply_codes(**options: Any) -> None:
    offsets = np.uint32([0, 2])
    jax_ep.grouped_matmul(row_codes(offsets), quantized_weights(8), offsets, **options)


def add_gradient_of_codes() -> None:
    offsets, cotangent = np.uint32([0, 2]), jnp.ones((2, 4), jnp.bfloat16)
    sums = np.ones((1, 128, 4), np.float32)
    jax_ep.grouped_matmul_gradient(row_codes(offsets), cotangent, offsets, sums)


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


def differentiate_codes() -> None:
    group = init(token_format=jax_ep.MXFP8(), hidden_size=128)

    def total(tokens: jax.Array) -> jax.Array:
        return jax_ep.dispatch(group, tokens, operands()[1]).tokens.astype(jnp.float32).sum()

    run(lambda rank: jax.grad(total)(jnp.ones((T, 128)) * rank.astype(jnp.float32)))


TRIGGERS: dict[str, Callable[[], Any]] = {
    "quantize-dtype": lambda: jax_ep.MXFP8().quantize(jnp.ones((T, 128), jnp.int32)),
    "quantize-type": lambda: jax_ep.MXFP8().quantize([[1.0] * 128]),
    "quantize-shape": lambda: jax_ep.MXFP8().quantize(jnp.ones(())),
    "codes-type": lambda: jax_ep.MXFP8().dequantize(*quantized()),
    "codes-dtype": lambda: jax_ep.MXFP8().dequantize(quantized(codes=jnp.ones((T, 128)))),
    "codes-scales": lambda: jax_ep.MXFP8().dequantize(
        quantized(scales=jnp.ones((T, 8), jnp.float8_e8m0fnu))
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
    "matmul-silu": multiply_activated,
    "matmul-result": lambda: multiply(np.ones((1, 8, 4), np.float32), dtype=jnp.bfloat16),
    "matmul-groups": lambda: jax_ep.grouped_matmul(jnp.ones((2, 8)), [], np.uint32([])),
    "matmul-codes": lambda: multiply(quantized_weights(8)),
    "matmul-format": lambda: multiply_codes(token_format=jax_ep.MXFP8()),
    "matmul-options": lambda: multiply_codes(transposed=True),
    "matmul-flag": lambda: multiply(np.ones((1, 8, 4), np.float32), transposed=None),
    "sums-shape": lambda: add_gradient(n=5),
    "sums-dtype": lambda: add_gradient(dtype=jnp.bfloat16),
    "sums-rows": lambda: add_gradient(n_rows=3),
    "sums-columns": add_gradient_of_codes,
    "weights-block": lambda: jax_ep.quantize_weights(np.ones((1, 8, 4), np.float32)),
    "weights-columns": lambda: jax_ep.quantize_weights(
        np.ones((1, 128, 4), np.float32), fp8_gradients=True
    ),
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
    "router-normalize": lambda: route(RouterConfig(normalize=True), jnp.ones((T, E)), 1),
    "router-type": lambda: route(None, jnp.ones((T, E)), K),
    "router-shape": lambda: balance_loss(jnp.ones((T, E)), jnp.zeros((T + 1, K), jnp.int32)),
    "router-dtype": lambda: route(RouterConfig(), jnp.ones((T, E), jnp.int32), K),
    "layer-axes": lambda: layer(init(), token_axes=()),
    "layer-shards": lambda: layer(init(make_mesh(jax.devices()[:4], (2, 2), ("dp", "ep"))))(
        jnp.ones((2, 2, H))
    ),
    "layer-dimensions": lambda: layer(init(), token_axes=jax.P(None, "ep"))(jnp.ones((R, H))),
    "layer-explicit": lambda: on_explicit_axes((R, H), jax.P()),
    "layer-explicit-axes": lambda: on_explicit_axes((R, H), jax.P(), token_axes="ep"),
    "layer-explicit-hidden": lambda: on_explicit_axes((R, H), jax.P(None, "ep")),
    "layer-explicit-mask": lambda: on_explicit_axes((R, H), jax.P("ep"), jax.P()),
    "layer-fsdp": lambda: layer(init(), fsdp_axis="ep"),
    "layer-fsdp-size": lambda: layer(
        init(make_mesh(jax.devices()[:6], (3, 2), ("dp", "ep"))), fsdp_axis="dp"
    ),
    "layer-arguments": lambda: layer(init(), router="softmax"),
    "layer-dtype": lambda: layer(init(), param_dtype=jnp.int32),
    "layer-selection": lambda: layer(init(top_k=E), router_bias=True),
    "layer-shared": lambda: layer(init(fused_shared_expert=True), shared_size=2 * H),
    "layer-capacity": lambda: layer(init(), capacity_factor=0),
    "layer-capacity-axis": lambda: layer(
        init(make_mesh(jax.devices()[:4], (2, 2), ("ep", "tp"))),
        token_axes="ep",
        capacity_axis="tp",
    ),
    "layer-pickle": lambda: pickle.dumps(layer(init())),
    "layer-no-capacity": lambda: layer(init(), on_limit="raise"),
    "layer-drops": lambda: run_layer(
        layer(init(name="train"), capacity_factor=0.5, on_limit="raise")
    ),
    "layer-expert-fn": lambda: layer(init(), expert_fn="gelu"),
    "layer-by-expert": lambda: layer(init(), expert_fn=nnx.Linear(H, H, rngs=nnx.Rngs(0)))(
        jnp.ones((R, H))
    ),
    "layer-routes": lambda: routed(Routes(jnp.zeros((R, 1), jnp.int32), None)),
    "layer-routes-type": lambda: routed((jnp.zeros((R, K), jnp.int32), None)),
    "layer-router-args": lambda: layer(init())(jnp.ones((R, H)), rngs=nnx.Rngs(0)),
    "layer-weights-on-input": lambda: layer(init(), weights_on_input=True),
    "layer-kernel-init": lambda: layer(init(), kernel_init=0.02),
    "layer-key": lambda: layer(init())(jax.random.split(jax.random.key(0), (R, H))),
    "layer-formats": lambda: layer(init(), fp8_matmuls=True),
    "layer-gradients": lambda: layer(init(), fp8_gradients=True),
    "layer-quantize": lambda: layer(init()).quantize_experts(),
    "layer-quantize-fsdp": lambda: fp8_layer(
        make_mesh(jax.devices()[:4], (2, 2), ("dp", "ep")), fsdp_axis="dp"
    ).quantize_experts(),
    "layer-quantize-twice": quantize_twice,
    "choices-axis": lambda: run(
        lambda rank: jax_ep.limit_choices(operands()[1], E, 1, axis_name="dp")
    ),
    "too-many-choices": lambda: jax.eval_shape(
        jax.shard_map(
            lambda ids: jax_ep.limit_choices(ids, E, 1, axis_name="ep"),
            mesh=make_mesh(),
            in_specs=jax.P("ep"),
            out_specs=jax.P("ep"),
        ),
        jax.ShapeDtypeStruct((2**30, K), jnp.int32),
    ),
    "layer-tokens": lambda: layer(init())(jnp.ones((R, H + 1))),
    "layer-tokens-dtype": lambda: layer(init())(jnp.ones((R, H), jnp.int32)),
    "layer-mask-dtype": lambda: layer(init())(jnp.ones((R, H)), jnp.ones(R, jnp.int32)),
    "layer-array": lambda: layer(init())([1.0]),
    "layer-inside": lambda: run(lambda rank: layer(init())(jnp.ones((R, H)))),
    "layer-mask": lambda: layer(init())(jnp.ones((R, 2, H)), jnp.ones(R, bool)),
    "layer-group": lambda: reassigned(layer(init()), combine_dtype=jnp.float32)(jnp.ones((R, H))),
    "layer-top-k": lambda: reassigned(layer(init()), top_k=1)(jnp.ones((R, H))),
    "layer-fused": lambda: reassigned(layer(init()), fused_shared_expert=True)(jnp.ones((R, H))),
    "layer-bias": lambda: layer(init()).update_bias(jnp.ones(E)),
}
