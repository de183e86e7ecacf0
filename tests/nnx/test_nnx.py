"""jax_ep.nnx.MoE against a dense layer in plain JAX: see nnx_layers.py."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import P

import jax_ep
import quick
from jax_ep.nnx import ExpertCodes
from jax_ep.router import RouterConfig
from nnx_layers import (
    LENGTH,
    V3,
    B,
    E,
    F,
    H,
    K,
    S,
    assert_close,
    dense,
    dense_gradients,
    host_program,
    is_kept,
    losses_of,
    make_layer,
    make_tokens,
    objective,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("one_process", "float32_matmuls")
V2 = RouterConfig(normalize=False, scaling=16.0, n_expert_groups=4, topk_expert_groups=2)
# The limit of the clamp is lower than GPT-OSS's, so that some values are beyond it.
GPT_OSS = {"expert_bias": True, "logit_bias": True, "interleaved": True, "clamp": (1.702, 1.0)}
V3_LAYER = {"router": V3, "router_bias": True, "shared_size": S, "balance_per_sequence": True}
# The additions to the plain layer: options of the module, of the config, and of the mesh.
VARIANTS = {
    "plain": {},
    "switch": {"router": RouterConfig(normalize=False)},
    "sigmoid": {"router": RouterConfig(scores="sigmoid", scaling=0.5)},
    "v2": {"router": V2, "shared_size": S},
    "v3": V3_LAYER,
    "fused_shared_expert": {"config": {"fused_shared_expert": True}},
    "expert_copies": {
        "axes": {"dp": 2, "ep": 4},
        "config": {"expert_copies": 3, "fused_shared_expert": True},
    },
    "skip_a2a": {"config": {"skip_a2a": True}, "shared_size": S},
    "skip_a2a_fused": {"config": {"skip_a2a": True, "fused_shared_expert": True}},
    "expert_copies_fsdp": {
        "axes": {"dp": 2, "ep": 4},
        "fsdp_axis": "dp",
        "config": {"expert_copies": 3},
    },
    "data_parallel": {"axes": {"dp": 2, "ep": 4}},
    "fsdp": {"axes": {"dp": 2, "ep": 4}, "fsdp_axis": "dp"},
    "replicated_tokens": {"axes": {"ep": 4, "tp": 2}, "token_axes": "ep"},
    "bfloat16": {"config": {"token_format": jax_ep.BF16(), "combine_dtype": jnp.bfloat16}},
    "gpt_oss": GPT_OSS,
    "gpt_oss_fsdp": GPT_OSS | {"axes": {"dp": 2, "ep": 4}, "fsdp_axis": "dp", "shared_size": S},
    "biases_fused": {"expert_bias": True, "config": {"fused_shared_expert": True}},
    "capacity": {"capacity_factor": 1.0, "shared_size": S},
    "capacity_skip_a2a": {"capacity_factor": 1.0, "config": {"skip_a2a": True}},
    "capacity_of_all": {"capacity_factor": 1.0, "capacity_axis": "ep"},
    "capacity_of_blocks": {
        "axes": {"dp": 2, "ep": 2},
        "token_axes": P("dp", "ep"),
        "capacity_factor": 0.5,
        "capacity_axis": ("dp", "ep"),
    },
    "capacity_skip_a2a_of_all": {
        "axes": {"dp": 2, "ep": 2},
        "config": {"skip_a2a": True},
        "capacity_factor": 1.0,
        "capacity_axis": "dp",
    },
    "transposed": {"transposed": True, "shared_size": S},
    "transposed_fsdp": GPT_OSS
    | {"axes": {"dp": 2, "ep": 4}, "fsdp_axis": "dp", "transposed": True, "shared_size": S},
    "transposed_fused": {"transposed": True, "config": {"fused_shared_expert": True}},
    "two_axes": {"axes": {"x": 2, "y": 2, "dp": 2}, "group_axes": ("x", "y")},
    # Sequences are sharded: over the group's axis, over another one, over one of the group's two.
    "sequence": {"axes": {"dp": 4, "ep": 2}, "token_axes": P("dp", "ep"), "shared_size": S},
    "sequence_v3": V3_LAYER | {"axes": {"ep": 4, "sp": 2}, "token_axes": P("ep", "sp")},
    "sequence_fsdp": {
        "axes": {"data": 2, "fsdp": 2, "ep": 2},
        "token_axes": P(("data", "fsdp"), "ep"),
        "fsdp_axis": "fsdp",
        "capacity_factor": 1.0,
    },
    "sequence_alone": V3_LAYER | {"axes": {"ep": 2}, "token_axes": P(None, "ep", None)},
    "sequence_two_axes": {
        "axes": {"x": 2, "y": 2},
        "group_axes": ("x", "y"),
        "token_axes": P("y", "x"),
        "expert_bias": True,
    },
    "sequence_skip_a2a": {
        "axes": {"dp": 2, "ep": 2, "sp": 2},
        "token_axes": P("dp", "sp"),
        "config": {"skip_a2a": True},
        "shared_size": S,
    },
}


# One each of the routers, formats and layouts; others have them in other company.
QUICK = {"v3", "skip_a2a_fused", "bfloat16", "gpt_oss_fsdp", "capacity_of_blocks"}


@pytest.mark.parametrize("name", quick.params(VARIANTS, QUICK))
def test_outputs_and_gradients_match_a_dense_layer(name, transport):
    layer, tokens = make_layer(transport, **VARIANTS[name]), make_tokens()

    @nnx.jit
    def step(layer, tokens):
        def loss(layer, tokens):
            output, report = layer(tokens)
            return objective(output, losses_of(report)), (output, report)

        which = nnx.DiffState(0, nnx.Param), 1
        return nnx.grad(loss, argnums=which, has_aux=True)(layer, tokens)

    (grads, of_tokens), (output, report) = step(layer, tokens)
    wanted, (dense_output, losses, load, of_dense_tokens) = dense_gradients(layer, tokens)
    error = 0.02 if name == "bfloat16" else 1e-4
    assert_close(output, dense_output, error)
    assert_close(of_tokens, of_dense_tokens, error)
    got = nnx.to_pure_dict(grads)
    assert set(got) == set(wanted) - {"router_bias"}
    for param, grad in got.items():
        assert_close(grad, wanted[param], error)
    if layer.fsdp_axes:  # as the parameters: no device holds more of a gradient
        (axis,) = layer.fsdp_axes
        for name, is_first in (("gate_up", True), ("down", False)):
            spec = P("ep", axis) if is_first != layer.transposed else P("ep", None, axis)
            sharding = jax.NamedSharding(layer.group.mesh, spec)
            assert got[name].sharding.is_equivalent_to(sharding, 3)
    jax.tree.map(assert_close, losses_of(report), losses)
    np.testing.assert_array_equal(report.expert_load, load)
    assert (report.n_limited > 0) == (layer.capacity_factor is not None)
    assert report.n_dropped == 0 and report.topk_ids.shape == (B, LENGTH, K)


# Relative errors that roundings to a dtype add up to.
DTYPES = {"float32": 1e-4, "float16": 0.004, "bfloat16": 0.02}
NO_OPTIONS = types.SimpleNamespace(
    router_config=RouterConfig(),
    capacity_factor=None,
    balance_per_sequence=False,
    interleaved=False,
    clamp=None,
    transposed=False,
)
# Halves the time of a test that is mostly compilation.
COMPILE_FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@jax.jit
def gradients_in_float32(weights, tokens):
    """Of the plain layer, for arrays of any dtype: those of the weights and tokens; and output."""

    def loss(weights, tokens):
        output, *_ = dense(weights, tokens, NO_OPTIONS)
        return jnp.sum(jnp.sin(output)), output

    floats = jax.tree.map(lambda x: x.astype(jnp.float32), (weights, tokens))
    return jax.grad(loss, argnums=(0, 1), has_aux=True)(*floats)


@pytest.mark.thorough
@pytest.mark.parametrize("token_dtype", DTYPES)
@pytest.mark.parametrize("param_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_parameters_and_experts_may_each_have_any_dtype(token_dtype, param_dtype, dtype):
    config = {"token_format": jax_ep.Plain(dtype), "combine_dtype": dtype}
    options = {"param_dtype": param_dtype, "kernel_init": nnx.initializers.normal(0.1)}
    layer = make_layer("auto", axes={"ep": 2}, config=config, **options)
    tokens = make_tokens(dtype=token_dtype)
    graphdef, params = nnx.split(layer)

    def loss(params, tokens):
        output, _ = nnx.merge(graphdef, params)(tokens)
        return jnp.sum(jnp.sin(output.astype(jnp.float32))), output

    step = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True), compiler_options=COMPILE_FAST)
    (grads, of_tokens), output = step(params, tokens)
    assert output.dtype == of_tokens.dtype == token_dtype
    (wanted, of_dense_tokens), dense_output = gradients_in_float32(weights_of(layer), tokens)
    error = max(DTYPES[each] for each in (token_dtype, param_dtype, dtype))
    assert_close(output, dense_output, error)
    assert_close(of_tokens, of_dense_tokens, error)
    for name, grad in nnx.to_pure_dict(grads).items():
        assert grad.dtype == param_dtype
        assert_close(grad, wanted[name], error)


def test_devices_exchange_rows_only():
    """Of XLA's collectives, only sums of the report remain."""
    layer = make_layer("auto", axes={"dp": 2, "ep": 4}, shared_size=S, router_bias=True)
    text = host_program(layer, make_tokens())
    assert text.count('custom_call_target="jax_ep_dispatch"') == 1
    assert text.count('custom_call_target="jax_ep_combine"') == 1
    assert " all-reduce" in text
    for other in ("all-gather", "all-to-all", "reduce-scatter", "collective-permute"):
        assert other not in text


def test_masked_tokens_go_nowhere():
    """And come back as zeros, without the shared expert's result."""
    layer, tokens = make_layer("auto", shared_size=S), make_tokens()
    mask = np.arange(LENGTH) < np.arange(B)[:, None]  # sequences of 0 to LENGTH tokens
    output, report = nnx.jit(lambda layer, *args: layer(*args))(layer, tokens, mask)
    whole, _ = nnx.jit(lambda layer, tokens: layer(tokens))(layer, tokens)
    assert_close(output, np.where(mask[..., None], whole, 0))
    assert report.expert_load.sum() == K * mask.sum()
    assert np.all((report.topk_ids >= 0) == mask[..., None])
    real = weights_of(layer), np.asarray(tokens)[mask], layer
    jax.tree.map(assert_close, losses_of(report), dense(*real)[1])


def test_rows_beyond_the_capacity_are_reported():
    layer = make_layer("auto", config={"recv_capacity": 20})
    tokens = make_tokens()
    _, report = nnx.jit(lambda layer, tokens: layer(tokens))(layer, tokens)
    rows_of_rank = np.asarray(report.expert_load).reshape(4, -1).sum(axis=1)
    assert report.n_dropped == np.maximum(rows_of_rank - 20, 0).sum() > 0


@pytest.mark.thorough
def test_choices_beyond_the_capacity_are_reported():
    layer, tokens = make_layer("auto", capacity_factor=1.0), make_tokens()
    mask = np.arange(LENGTH) < np.arange(B)[:, None]
    call = nnx.jit(lambda layer, *args: layer(*args))
    output, report = call(layer, tokens)
    assert report.n_limited == K * B * LENGTH - is_kept(report.topk_ids, layer).sum()
    assert report.expert_load.sum() == K * B * LENGTH
    # Padding takes no capacity, although it counts in T.
    _, masked = call(layer, tokens, mask)
    capacity = -(-K * B * LENGTH // 4 // E)
    ids = np.asarray(masked.topk_ids).reshape(4, -1)
    loads = [np.bincount(each[each >= 0], minlength=E) for each in ids]
    assert masked.n_limited == np.maximum(np.array(loads) - capacity, 0).sum() > 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    "fp8_gradients, fp8_matmuls, transposed",
    [
        (False, False, False),
        (False, True, False),
        (False, False, True),
        (False, True, True),
        (True, True, False),
        (True, True, True),
    ],
)
def test_tokens_may_travel_in_fp8(fp8_gradients, fp8_matmuls, transposed, transport):
    config = {"token_format": jax_ep.BlockwiseFP8(), "combine_dtype": jnp.bfloat16}
    options = {"shared_size": S, "fp8_matmuls": fp8_matmuls, "expert_bias": True}
    options |= {"transposed": transposed, "fp8_gradients": fp8_gradients}
    layer, tokens = make_layer(transport, config=config, **options), make_tokens()

    @nnx.jit
    def step(layer, tokens):
        def loss(layer):
            output, report = layer(tokens)
            return objective(output, losses_of(report)), output

        return nnx.grad(loss, has_aux=True)(layer)

    grads, output = step(layer, tokens)
    assert output.dtype == jnp.float32  # that of the tokens
    wanted, (dense_output, *_) = dense_gradients(layer, tokens)
    assert_close(output, dense_output, 0.1)
    for param, grad in nnx.to_pure_dict(grads).items():
        assert_close(grad, wanted[param], 0.15)


@pytest.mark.thorough
@pytest.mark.parametrize("transposed", [False, True])
def test_experts_quantized_once_give_the_same_bits(transposed, transport):
    options = {"fp8_matmuls": True, "expert_bias": True, "transposed": transposed}
    config = {"token_format": jax_ep.BlockwiseFP8(), "combine_dtype": jnp.bfloat16}
    layer = make_layer(transport, config=config, **options)
    run = nnx.jit(lambda layer, tokens: layer(tokens)[0])
    wanted = run(layer, make_tokens())
    layer.quantize_experts()
    for name in ("gate_up", "down"):
        codes = getattr(layer, name)
        assert isinstance(codes, ExpertCodes) and codes.dtype == jnp.float8_e4m3fn
        assert codes.sharding.spec[0] == "ep", "each rank has its own experts' codes"
    np.testing.assert_array_equal(run(layer, make_tokens()), wanted)
    grads = nnx.jit(nnx.grad(lambda layer: layer(make_tokens())[0].sum()))(layer)
    assert "gate_up" not in grads and np.asarray(grads["router"][...]).any()
    with pytest.raises(ValueError, match=r"quantize_experts: .* must not be codes already"):
        layer.quantize_experts()


@pytest.mark.thorough
def test_own_experts_take_the_place_of_expert_mlp(transport):
    calls = []

    def twice(dispatched, gate_up, down, **options):
        calls.append(options)
        return 2 * jax_ep.expert_mlp(dispatched, gate_up, down, **options)

    layer = make_layer(transport)
    own = make_layer(transport, expert_fn=twice)
    run = nnx.jit(lambda layer, tokens: layer(tokens)[0])
    np.testing.assert_array_equal(run(own, make_tokens()), 2 * run(layer, make_tokens()))
    assert calls[0].keys() == {"gate_up_bias", "down_bias", "interleaved", "clamp"}


@pytest.mark.thorough
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_transposed_parameters_are_the_same_numbers(param_dtype):
    """So they have the scale of their own fan-in, for initializers that are not symmetric, too."""
    options = {"shared_size": S, "param_dtype": param_dtype}
    options |= {"axes": {"dp": 2, "ep": 4}, "fsdp_axis": "dp"}
    plain, other = [make_layer("xla", transposed=each, **options) for each in (False, True)]
    assert other.gate_up.shape == (E, 2 * F, H) and other.down.shape == (E, H, F)
    assert other.shared_gate_up.shape == (2 * S, H) and other.shared_down.shape == (H, S)
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(other)))
    assert (specs["gate_up"], specs["down"]) == (P("ep", None, "dp"), P("ep", "dp", None))
    weights, transposed = weights_of(plain), weights_of(other)
    for name, value in weights.items():
        swapped = value if name == "router" else value.swapaxes(-1, -2)
        np.testing.assert_array_equal(transposed[name], swapped, name)
    np.testing.assert_array_equal(
        nnx.jit(lambda layer, x: layer(x)[1].topk_ids)(plain, make_tokens()),
        nnx.jit(lambda layer, x: layer(x)[1].topk_ids)(other, make_tokens()),
    )


@pytest.mark.thorough
@pytest.mark.parametrize("fp8_matmuls", [False, True])
def test_own_experts_know_whether_weights_are_transposed(fp8_matmuls):
    calls = []

    def experts(dispatched, gate_up, down, **options):
        calls.append((options.get("transposed", False), type(gate_up)))
        return jax_ep.expert_mlp(dispatched, gate_up, down, **options)

    config = {"token_format": jax_ep.BlockwiseFP8(), "combine_dtype": jnp.bfloat16}
    options = {"fp8_matmuls": fp8_matmuls, "config": config, "transposed": True}
    layer = make_layer("auto", expert_fn=experts, **options)
    nnx.jit(lambda layer, tokens: layer(tokens)[0])(layer, make_tokens())
    is_transposed, kind = calls[0]
    assert is_transposed == (not fp8_matmuls)
    assert (kind is jax_ep.QuantizedWeights) == fp8_matmuls
