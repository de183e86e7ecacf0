"""jax_ep.nnx.MoE in programs: stacked, trained, saved, on other meshes; what it refuses."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax import P

import jax_ep
from jax_ep.nnx import MoE, RouterBias
from jax_ep.router import RouterConfig
from nnx_layers import (
    V3,
    B,
    E,
    F,
    H,
    S,
    assert_close,
    dense,
    losses_of,
    make_layer,
    make_mesh,
    make_tokens,
    objective,
    open_group,
    weights_of,
)
from processes import child_environment

pytestmark = pytest.mark.usefixtures("one_process", "float32_matmuls")


@pytest.mark.thorough
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


@pytest.mark.thorough
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


@pytest.mark.thorough
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


@pytest.mark.thorough
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
        ({"token_axes": ("ep", "tp")}, "token_axes must be different axes of the mesh"),
        ({"token_axes": ("ep", "ep")}, r"token_axes must be different axes .* got \('ep', 'ep'\)"),
        ({"token_axes": 0}, r"token_axes must be .* got \(0,\)"),
        ({"fsdp_axis": ("dp", "dp")}, r"fsdp_axis must be .* got \('dp', 'dp'\)"),
        ({"fsdp_axis": "dp", "config": {"hidden_size": 3}}, "divides hidden_size=3; got .* size 2"),
        ({"shared_size": 1.5}, "shared_size must be a positive integer; got 1.5"),
        ({"router_bias": np.ones(E)}, r"router_bias must be True or False; got array\(\[1"),
        ({"param_dtype": jnp.int32}, "param_dtype must be a floating-point dtype.* got int32"),
        ({"param_dtype": "bf16"}, "param_dtype must be a floating-point dtype.* got 'bf16'"),
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
        (
            {"capacity_axis": "tp"},
            r"capacity_axis must be .* got \('tp',\), tokens .* \('dp', 'ep'\)",
        ),
        ({"capacity_axis": ("ep", "ep")}, r"capacity_axis must be .* got \('ep', 'ep'\)"),
        ({"capacity_axis": "dp", "token_axes": "ep"}, r"capacity_axis must be .* got \('dp',\)"),
        (
            {"capacity_axis": "dp", "token_axes": ("dp", "ep")},
            r"capacity_factor must be given with .*; got None, capacity_axis=\('dp',\)",
        ),
        (
            {"on_limit": "raise"},
            "capacity_factor must be given with .*; got None, on_limit='raise'",
        ),
        ({"on_limit": "drop"}, 'on_limit must be "count" or "raise"; got \'drop\''),
        ({"clamp": (1.702, -7.0)}, r"nnx.MoE: clamp must be \(alpha, limit\)"),
        ({"transposed": 1}, "transposed must be True or False; got 1"),
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


@pytest.mark.parametrize("size", [0, 12.5, "128"])
def test_the_size_of_an_expert_is_a_count(size):
    with pytest.raises(ValueError, match=f"expert_size must be (a )?positive.* got {size!r}"):
        MoE(open_group("xla", {"ep": 4}), size, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"group": None}, "nnx.MoE: group must be an EPGroup made by ep_init; got NoneType"),
        ({"router": "softmax"}, "router must be a RouterConfig or None; got 'softmax'"),
        ({"rngs": 0}, r"rngs must be an nnx.Rngs, such as nnx.Rngs\(0\); got 0"),
    ],
)
def test_types_of_arguments_are_checked(options, message):
    given = {"group": open_group("xla", {"ep": 4}), "rngs": nnx.Rngs(0)} | options
    with pytest.raises(TypeError, match=message):
        MoE(given.pop("group"), F, **given)


@pytest.mark.parametrize(
    "tokens, mask, message",
    [
        (np.ones((3, 1, H), np.float32), None, "a multiple of 4, the shards .* Pad the tokens"),
        (np.ones((B, H), np.int32), None, "floating-point numbers; got int32. Are these ids"),
        (np.ones((B, H), bool), None, "tokens must be floating-point numbers; got bool"),
        (np.ones((B, H), np.float32), np.ones(B, np.int32), r"got int32. Pass mask.astype\(bool\)"),
        (np.ones((B, H), np.float32), np.ones(B, np.float32), "mask must be bool; got float32"),
    ],
)
def test_tokens_and_mask_are_checked(tokens, mask, message):
    with pytest.raises(ValueError, match=f"^nnx.MoE: .*{message}"):
        make_layer("xla")(tokens, mask)


@pytest.mark.parametrize("arguments", [(None,), ([[1.0] * H] * B,), (np.ones((B, H)), [True] * B)])
def test_tokens_and_mask_are_arrays(arguments):
    with pytest.raises(
        TypeError, match="^nnx.MoE: (tokens|mask) must be an array; got (None|list)"
    ):
        make_layer("xla")(*arguments)


@pytest.mark.parametrize("axis_names", [{"dp"}, {"dp", "ep"}])
def test_a_call_inside_shard_map_names_what_to_call_there(axis_names):
    layer = make_layer("xla", axes={"dp": 2, "ep": 4})
    call = jax.shard_map(
        lambda tokens: layer(tokens)[0],
        mesh=layer.group.mesh,
        in_specs=P("dp"),
        out_specs=P("dp"),
        axis_names=axis_names,
    )
    with pytest.raises(
        ValueError, match=r"outside of jax.shard_map.* manual axes here: .*'dp'.* jax_ep.dispatch"
    ):
        jax.jit(call)(make_tokens())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"n_experts": 8}, r"layer's experts: \[H, E\] = \[128, 16\]; got \[128, 8\]"),
        ({"skip_a2a": True}, r"none of the group's, because of skip_a2a; got \('ep',\)"),
        ({"fused_shared_expert": True}, "of expert_size=128; the layer has shared_size=None"),
    ],
)
def test_an_assigned_group_must_fit_the_layer(options, message):
    layer = make_layer("xla")
    layer.group = open_group("xla", {"ep": 4}, **options)
    with pytest.raises(ValueError, match=message):
        layer(make_tokens())


def test_an_assigned_group_must_be_a_group_along_the_tokens():
    layer = make_layer("xla")
    layer.group = open_group("xla", {"x": 4}, "x")
    with pytest.raises(ValueError, match=r"all of the group's; got \('ep',\), the group has \('x'"):
        layer(make_tokens())
    layer.group = None
    with pytest.raises(TypeError, match="nnx.MoE: group must be an EPGroup"):
        layer(make_tokens())


def test_update_bias_needs_a_bias():
    with pytest.raises(ValueError, match="create it with router_bias=True"):
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
