"""jax_ep.nnx.MoE against a dense layer in plain JAX, where every expert processes every token."""

import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax import P
from jax.sharding import Mesh

import jax_ep
from jax_ep.nnx import MoE, RouterBias
from jax_ep.router import RouterConfig, balance_loss, expert_load, route
from processes import child_environment

pytestmark = pytest.mark.usefixtures("one_process")
E, K, H, F, S = 16, 3, 128, 128, 64
B, LENGTH = 8, 6
V2 = RouterConfig(normalize=False, scaling=16.0, n_expert_groups=4, topk_expert_groups=2)
V3 = RouterConfig(
    scores="sigmoid", scaling=2.5, n_expert_groups=4, topk_expert_groups=2, group_scores="top2"
)
# The limit of the clamp is lower than GPT-OSS's, so that some values are beyond it.
GPT_OSS = {"expert_bias": True, "logit_bias": True, "interleaved": True, "clamp": (1.702, 1.0)}
# What a layer adds to the plain one: options of the module, of the config, and of the mesh.
VARIANTS = {
    "plain": {},
    "switch": {"router": RouterConfig(normalize=False)},
    "sigmoid": {"router": RouterConfig(scores="sigmoid", scaling=0.5)},
    "v2": {"router": V2, "shared_size": S},
    "v3": {"router": V3, "router_bias": True, "shared_size": S, "balance_per_sequence": True},
    "fused_shared_expert": {"config": {"fused_shared_expert": True}},
    "skip_a2a": {"config": {"skip_a2a": True}, "shared_size": S},
    "skip_a2a_fused": {"config": {"skip_a2a": True, "fused_shared_expert": True}},
    "data_parallel": {"axes": {"dp": 2, "ep": 4}},
    "fsdp": {"axes": {"dp": 2, "ep": 4}, "fsdp_axis": "dp"},
    "replicated_tokens": {"axes": {"ep": 4, "tp": 2}, "token_axes": "ep"},
    "bfloat16": {"config": {"token_format": jax_ep.BF16(), "combine_dtype": jnp.bfloat16}},
    "gpt_oss": GPT_OSS,
    "gpt_oss_fsdp": GPT_OSS | {"axes": {"dp": 2, "ep": 4}, "fsdp_axis": "dp", "shared_size": S},
    "biases_fused": {"expert_bias": True, "config": {"fused_shared_expert": True}},
    "capacity": {"capacity_factor": 1.0, "shared_size": S},
    "capacity_skip_a2a": {"capacity_factor": 1.0, "config": {"skip_a2a": True}},
    "two_axes": {"axes": {"x": 2, "y": 2, "dp": 2}, "group_axes": ("x", "y")},
}


def make_mesh(axes):
    sizes = tuple(axes.values())
    n_devices = int(np.prod(sizes))
    if len(jax.devices()) < n_devices:
        pytest.skip(f"needs {n_devices} devices, found {len(jax.devices())}")
    return Mesh(np.array(jax.devices()[:n_devices]).reshape(sizes), tuple(axes))


def open_group(transport, axes, group_axes="ep", mesh=None, **options):
    defaults = {
        "n_experts": E,
        "top_k": K,
        "hidden_size": H,
        "max_tokens_per_rank": B * LENGTH,
        "token_format": jax_ep.Plain(jnp.float32),
        "combine_dtype": jnp.float32,
    }
    mesh = mesh or make_mesh(axes)
    return jax_ep.ep_init(mesh, group_axes, jax_ep.EPConfig(**defaults | options), transport)


def make_layer(transport, *, axes=None, group_axes="ep", config=None, **options):
    group = open_group(transport, axes or {"ep": 4}, group_axes, **config or {})
    layer = MoE(group, F, rngs=nnx.Rngs(0), **options)
    if layer.router_bias is not None:
        layer.router_bias[...] = 0.3 * jax.random.normal(jax.random.key(5), (E,))
    for i, name in enumerate(("logit_bias", "gate_up_bias", "down_bias")):
        bias = getattr(layer, name)
        if bias is not None:
            assert not bias[...].any()
            bias[...] = 0.3 * jax.random.normal(jax.random.key(i), bias.shape, bias.dtype)
    return layer


def make_tokens(shape=(B, LENGTH, H), dtype=jnp.float32):
    return jax.random.normal(jax.random.key(1), shape, dtype)


def is_kept(topk_ids, layer):
    """`bool[..., K]`: choices within the capacity of their expert, which counts rank by rank."""
    n_ranks = int(np.prod([layer.group.mesh.shape[name] for name in layer.token_axes]))
    choices = jax.nn.one_hot(topk_ids.reshape(n_ranks, -1), E)
    capacity = np.ceil(layer.capacity_factor * choices.shape[1] / E)
    earlier = jnp.cumsum(choices, axis=1) - choices  # choices of the same expert
    return ((earlier * choices).sum(axis=-1) < capacity).reshape(topk_ids.shape)


def activate(hidden, layer):
    gate, up = jnp.split(hidden, 2, axis=-1)
    if layer.interleaved:
        gate, up = hidden[..., ::2], hidden[..., 1::2]
    if layer.clamp is None:
        return jax.nn.silu(gate) * up
    alpha, limit = layer.clamp
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)


def dense(weights, tokens, layer):
    """Output, losses and load, on one device."""
    config, bias = layer.router_config, weights.get("router_bias")
    logits = tokens @ weights["router"] + weights.get("logit_bias", 0)
    routes = route(config, logits, K, bias)
    choices = jax.nn.one_hot(routes.topk_ids, E)
    if layer.capacity_factor is not None:
        choices = jnp.where(is_kept(routes.topk_ids, layer)[..., None], choices, 0)
    gates = jnp.einsum("...k,...ke->...e", routes.topk_weights, choices)
    hidden = jnp.einsum("...h,ehf->...ef", tokens, weights["gate_up"])
    values = activate(hidden + weights.get("gate_up_bias", 0), layer)
    results = jnp.einsum("...ef,efh->...eh", values, weights["down"])
    output = jnp.einsum("...e,...eh->...h", gates, results + weights.get("down_bias", 0))
    if "shared_down" in weights:
        output += activate(tokens @ weights["shared_gate_up"], layer) @ weights["shared_down"]
    loss = balance_loss(routes.scores, routes.topk_ids, per_sequence=layer.balance_per_sequence)
    z_loss = jnp.mean(jnp.log(jnp.exp(logits).sum(axis=-1)) ** 2)
    return output, (loss, z_loss), expert_load(routes.topk_ids, E)


def weights_of(layer):
    """The layer's variables on one device, by name."""
    state = nnx.to_pure_dict(nnx.state(layer))
    return jax.device_put(jax.tree.map(np.asarray, state), jax.devices()[0])


def assert_close(got, wanted, error=1e-4):
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape
    assert np.linalg.norm(got - wanted) <= error * np.linalg.norm(wanted)


def objective(output, losses):
    balance, z_loss = losses
    return jnp.sum(jnp.sin(output.astype(jnp.float32))) + 3 * balance + 0.5 * z_loss


def losses_of(report):
    return report.balance_loss, report.z_loss


def dense_gradients(layer, tokens):
    """Gradients of the weights, then output, losses, load and the gradient of the tokens."""

    @jax.jit
    def gradients(weights, tokens):
        def loss(weights, tokens):
            output, losses, load = dense(weights, tokens, layer)
            return objective(output, losses), (output, losses, load)

        grads, results = jax.grad(loss, argnums=(0, 1), has_aux=True)(weights, tokens)
        return grads[0], (*results, grads[1])

    return gradients(weights_of(layer), jax.device_put(tokens, jax.devices()[0]))


@pytest.fixture(autouse=True)
def float32_matmuls():
    with jax.default_matmul_precision("float32"):
        yield


@pytest.mark.parametrize("name", VARIANTS)
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
        assert got["gate_up"].sharding.spec == P("ep", "dp")
        assert got["down"].sharding.spec == P("ep", None, "dp")
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
    if layer.group.transport != "host":
        pytest.skip(f"looks at programs of transport host, not {layer.group.transport}")
    tokens = jax.device_put(make_tokens(), jax.NamedSharding(layer.group.mesh, P(("dp", "ep"))))
    graphdef, state = nnx.split(layer)
    compiled = jax.jit(lambda *args: nnx.merge(graphdef, args[0])(args[1])).lower(state, tokens)
    text = compiled.compile().as_text()
    assert text.count('custom_call_target="jax_ep_dispatch"') == 1
    assert text.count('custom_call_target="jax_ep_combine"') == 1
    assert " all-reduce" in text
    for other in ("all-gather", "all-to-all", "reduce-scatter", "collective-permute"):
        assert other not in text


def test_masked_tokens_go_nowhere():
    layer, tokens = make_layer("auto", shared_size=S), make_tokens()
    mask = np.arange(LENGTH) < np.arange(B)[:, None]  # sequences of 0 to LENGTH tokens
    output, report = nnx.jit(lambda layer, *args: layer(*args))(layer, tokens, mask)
    whole, _ = nnx.jit(lambda layer, tokens: layer(tokens))(layer, tokens)
    weights = weights_of(layer)
    shared = dense(weights | {"down": 0 * weights["down"]}, tokens, layer)[0]
    assert_close(output, np.where(mask[..., None], whole, shared))
    assert report.expert_load.sum() == K * mask.sum()
    assert np.all((report.topk_ids >= 0) == mask[..., None])
    real = weights, np.asarray(tokens)[mask], layer
    jax.tree.map(assert_close, losses_of(report), dense(*real)[1])


def test_rows_beyond_the_capacity_are_reported():
    layer = make_layer("auto", config={"recv_capacity": 20})
    tokens = make_tokens()
    _, report = nnx.jit(lambda layer, tokens: layer(tokens))(layer, tokens)
    rows_of_rank = np.asarray(report.expert_load).reshape(4, -1).sum(axis=1)
    assert report.n_dropped == np.maximum(rows_of_rank - 20, 0).sum() > 0


def test_choices_beyond_the_capacity_are_reported():
    layer, tokens = make_layer("auto", capacity_factor=1.0), make_tokens()
    mask = np.arange(LENGTH) < np.arange(B)[:, None]
    call = nnx.jit(lambda layer, *args: layer(*args))
    output, report = call(layer, tokens)
    assert report.n_limited == K * B * LENGTH - is_kept(report.topk_ids, layer).sum()
    assert report.expert_load.sum() == K * B * LENGTH
    # Padding takes no places, although it counts in T.
    _, masked = call(layer, tokens, mask)
    capacity = -(-K * B * LENGTH // 4 // E)
    ids = np.asarray(masked.topk_ids).reshape(4, -1)
    loads = [np.bincount(each[each >= 0], minlength=E) for each in ids]
    assert masked.n_limited == np.maximum(np.array(loads) - capacity, 0).sum() > 0


@pytest.mark.parametrize("fp8_matmuls", [False, True])
def test_tokens_may_travel_in_fp8(fp8_matmuls, transport):
    config = {"token_format": jax_ep.BlockwiseFP8(), "combine_dtype": jnp.bfloat16}
    options = {"shared_size": S, "fp8_matmuls": fp8_matmuls, "expert_bias": True}
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


def test_layers_stacked_by_scan_and_remat_match_a_loop():
    n_layers, tokens = 3, make_tokens()
    group = open_group("auto", {"dp": 2, "ep": 4})
    no_name = {nnx.PARTITION_NAME: None}

    @nnx.split_rngs(splits=n_layers)
    @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata=no_name)
    def make(rngs):
        return MoE(group, F, router=V3, router_bias=True, shared_size=S, rngs=rngs)

    layers = make(nnx.Rngs(0))
    assert layers.gate_up[...].sharding.spec[:2] == (None, "ep")
    before = weights_of(layers)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0), transform_metadata=no_name)
    @nnx.remat
    def apply(layer, tokens):
        output, report = layer(tokens)
        return tokens + output, report

    @nnx.jit
    def step(layers, tokens):
        def loss(layers):
            output, reports = apply(layers, tokens)
            return objective(output, jax.tree.map(jnp.sum, losses_of(reports))), reports

        grads, reports = nnx.grad(loss, has_aux=True)(layers)
        layers.update_bias(reports.expert_load, rate=0.5)
        return grads, reports

    def dense_loss(weights):
        x, total, loads = tokens, (0.0, 0.0), []
        for i in range(n_layers):
            layer_weights = jax.tree.map(lambda x, i=i: x[i], weights)
            output, losses, load = dense(layer_weights, x, layers)
            x, total = x + output, jax.tree.map(jnp.add, total, losses)
            loads.append(load)
        return objective(x, total), jnp.stack(loads)

    grads, reports = step(layers, tokens)
    wanted, loads = jax.jit(jax.grad(dense_loss, has_aux=True))(before)
    loads = np.asarray(loads)
    np.testing.assert_array_equal(reports.expert_load, loads)
    for param, grad in nnx.to_pure_dict(grads).items():
        assert_close(grad, wanted[param], 1e-3)
    error = loads.mean(axis=1, keepdims=True) - loads
    np.testing.assert_array_equal(layers.router_bias[...], 0.5 * np.sign(error))


@jax.numpy_dtype_promotion("standard")  # optax needs it
def test_training_moves_parameters_by_gradients_and_the_bias_by_loads():
    layer, tokens = make_layer("auto", router_bias=True), make_tokens()
    optimizer = nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def train_step(layer, optimizer):
        def loss(layer):
            output, report = layer(tokens)
            return jnp.mean((output - jnp.roll(tokens, 1, axis=-1)) ** 2), report

        (value, report), grads = nnx.value_and_grad(loss, has_aux=True)(layer)
        optimizer.update(layer, grads)
        layer.update_bias(report.expert_load, 0.01)
        return value, report.expert_load

    bias = np.asarray(layer.router_bias[...])
    first, load = jax.tree.map(np.asarray, train_step(layer, optimizer))
    np.testing.assert_allclose(
        layer.router_bias[...], bias + 0.01 * np.sign(load.mean() - load), rtol=1e-6
    )
    for _ in range(20):
        last, _ = train_step(layer, optimizer)
        float(last)  # waits
    assert last < 0.5 * first
    assert layer.gate_up[...].sharding.spec[0] == "ep"
    moments = nnx.state(optimizer, lambda path, _: path[-1] == "gate_up")
    specs = [moment.sharding.spec[0] for moment in jax.tree.leaves(moments)]
    assert specs == ["ep", "ep"]


@pytest.mark.parametrize("jitted", [False, True])
def test_parameters_are_created_on_their_devices(jitted):
    group = open_group("xla", {"dp": 2, "ep": 4})

    def make():
        options = {"router_bias": True, "logit_bias": True, "expert_bias": True}
        return MoE(group, F, shared_size=S, fsdp_axis="dp", rngs=nnx.Rngs(0), **options)

    layer = nnx.jit(make)() if jitted else make()
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layer)))
    expected = {name: P(*[None] * each.ndim) for name, each in weights_of(layer).items()}
    expected |= {"gate_up": P("ep", "dp", None), "down": P("ep", None, "dp")}
    expected |= {"gate_up_bias": P("ep", None), "down_bias": P("ep", None)}
    assert specs == expected
    for name, value in nnx.to_pure_dict(nnx.state(layer)).items():
        sharding = jax.NamedSharding(group.mesh, specs[name])
        assert value.sharding.is_equivalent_to(sharding, value.ndim)
    assert np.unique(layer.gate_up[:, 0, 0]).size == E  # every expert has its own values


def test_a_checkpoint_is_restored_on_another_mesh(tmp_path):
    axes, options = {"dp": 2, "ep": 4}, {"router_bias": True, "shared_size": S}
    saved = make_layer("xla", axes=axes, **options)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "layer", nnx.state(saved))
    group = open_group("xla", {"ep": 2})

    def make():
        return MoE(group, F, rngs=nnx.Rngs(1), **options)

    graphdef, abstract = nnx.get_abstract_model(make, group.mesh)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = nnx.merge(graphdef, checkpointer.restore(tmp_path / "layer", abstract))
    before, after = weights_of(saved), weights_of(restored)
    assert set(before) == set(after) >= {"router_bias", "shared_down"}
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert restored.gate_up[...].sharding == jax.NamedSharding(group.mesh, P("ep", None, None))
    assert isinstance(restored.router_bias, RouterBias)
    tokens = make_tokens()
    call = nnx.jit(lambda layer, tokens: layer(tokens)[0])
    assert_close(call(restored, tokens), call(saved, tokens), 1e-6)


def test_another_group_runs_the_same_parameters():
    layer, tokens = make_layer("auto"), make_tokens((B, 1, H))
    call = nnx.jit(lambda layer, tokens: layer(tokens)[0])
    wanted = call(layer, tokens)
    layer.group = open_group("auto", {"ep": 4}, max_tokens_per_rank=2)
    np.testing.assert_array_equal(call(layer, tokens), wanted)
    with pytest.raises(ValueError, match="max_tokens_per_rank"):
        call(layer, make_tokens())


def test_meshes_with_explicit_axes_work():
    names, devices = ("dp", "ep"), make_mesh({"dp": 2, "ep": 4}).devices.flat
    mesh = jax.make_mesh((2, 4), names, (jax.sharding.AxisType.Explicit,) * 2, devices=[*devices])
    group = open_group("auto", None, mesh=mesh)
    layer = MoE(group, F, fsdp_axis="dp", rngs=nnx.Rngs(0))
    tokens = jax.device_put(make_tokens(), jax.NamedSharding(mesh, P(names)))
    output, _ = nnx.jit(lambda layer, tokens: layer(tokens))(layer, tokens)
    assert_close(output, dense(weights_of(layer), np.asarray(tokens), layer)[0])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"router": RouterConfig(n_expert_groups=3)}, "n_experts=16, n_expert_groups=3"),
        ({"token_axes": "dp"}, r"token_axes must be .* all of the group's; got \('dp',\)"),
        ({"fsdp_axis": "dp", "token_axes": "ep"}, r"fsdp_axis must be .* got \('dp',\)"),
        ({"token_axes": ("ep", "tp")}, "token_axes must be axes of the mesh"),
        ({"config": {"skip_a2a": True}, "token_axes": "ep"}, "none of the group's"),
        (
            {"config": {"fused_shared_expert": True}, "shared_size": S},
            "shared_size must be expert_size with fused_shared_expert; got shared_size=64",
        ),
        (
            {"config": {"token_format": jax_ep.BF16()}},
            "combine_dtype=float32, but token_format carries bfloat16. Change one",
        ),
        ({"config": {"combine_dtype": jnp.bfloat16}}, "token_format carries float32"),
        ({"capacity_factor": 0}, "capacity_factor must be a number, positive .*, or None; got 0"),
        ({"capacity_factor": "1"}, "capacity_factor must be .* got '1'"),
        ({"capacity_factor": True}, "capacity_factor must be .* got True"),
        ({"capacity_factor": jnp.float32(1)}, r"capacity_factor must be .* got Array\(1"),
        ({"clamp": (1.702, -7.0)}, r"nnx.MoE: clamp must be \(alpha, limit\)"),
        ({"interleaved": 1}, "nnx.MoE: interleaved must be True or False; got 1"),
        (
            {
                "fp8_matmuls": True,
                "config": {"token_format": jax_ep.BF16(), "combine_dtype": jnp.bfloat16},
            },
            "fp8_matmuls needs the token_format BlockwiseFP8",
        ),
        (
            {"fp8_matmuls": True, "config": {"token_format": jax_ep.BlockwiseFP8()}},
            "fp8_matmuls needs combine_dtype=bfloat16, .* got float32",
        ),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        make_layer("xla", axes={"dp": 2, "ep": 4}, **options)


def test_a_call_must_fit_the_mesh_and_the_group():
    layer = make_layer("xla")
    with pytest.raises(ValueError, match="a multiple of 4, the shards .* Pad the tokens"):
        layer(make_tokens((3, LENGTH, H)))
    layer.group = open_group("xla", {"ep": 4}, n_experts=8)
    with pytest.raises(
        ValueError, match=r"layer's experts: \[H, E\] = \[128, 16\]; got \[128, 8\]"
    ):
        layer(make_tokens())


def test_update_bias_needs_a_bias():
    with pytest.raises(ValueError, match="create it with router_bias"):
        make_layer("xla").update_bias(jnp.zeros(E))


def run_python(code):
    return subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_importing_jax_ep_does_not_import_flax():
    done = run_python("import sys, jax_ep, jax_ep.router; assert 'flax' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_without_flax_an_error_names_the_extra():
    done = run_python("import sys; sys.modules['flax'] = None; import jax_ep.nnx")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: jax_ep.nnx needs flax: pip install 'jax_ep[nnx]'."
    )
