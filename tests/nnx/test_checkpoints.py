"""jax_ep.checkpoints: loaded layers do what their models define, and are saved as they were."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import jax_ep
import quick
from harness import assert_same_bits, float32_group
from jax_ep import checkpoints
from jax_ep.nnx import MoE
from nnx_layers import assert_close, make_mesh
from processes import run_processes
from published_layers import (
    DeepseekV3,
    E,
    F,
    GptOss,
    H,
    K,
    Mixtral,
    Qwen3,
    T,
    in_fp8,
    in_mxfp4,
    write_safetensors,
)

pytestmark = pytest.mark.usefixtures("one_process", "float32_matmuls")

PUBLISHED = {
    "qwen3_moe": Qwen3(),
    "mixtral": Mixtral(),
    "deepseek_v3": DeepseekV3(),
    "gpt_oss": GptOss(),
}


def layers_of(model):
    """The layout, the model, and the options of its layers, by its `config.json`."""
    layout, sizes, options = checkpoints.from_config(model.config)
    assert sizes == {"n_experts": E, "top_k": K, "hidden_size": H}
    assert options.pop("expert_size") == F
    return layout, model, options


MODELS = {name: layers_of(model) for name, model in PUBLISHED.items()}
FP8 = {"token_format": jax_ep.BlockwiseFP8(), "combine_dtype": jnp.bfloat16}


def open_group(axes, **config):
    sizes = dict(n_experts=E, top_k=K, hidden_size=H, max_tokens_per_rank=T)
    mesh = make_mesh(axes) if isinstance(axes, dict) else axes
    return float32_group(mesh, "auto", "ep", **sizes | config)


def abstract_layer(axes, config=None, codes=False, n_layers=None, **options):
    """Without arrays, so that `load` must fill them all; stacked if there are `n_layers`."""
    group = open_group(axes, **config or {})

    def create(key):
        layer = MoE(group, F, rngs=nnx.Rngs(key), **options)
        if codes:
            layer.quantize_experts()
        return layer

    if n_layers is None:
        return nnx.eval_shape(lambda: create(jax.random.key(0)))
    metadata = {nnx.PARTITION_NAME: None}
    stack = nnx.vmap(create, in_axes=0, out_axes=0, transform_metadata=metadata)
    return nnx.eval_shape(lambda: stack(jax.random.split(jax.random.key(0), n_layers)))


def make_tokens():
    return jax.random.normal(jax.random.key(1), (T, H))


def outputs(layer):
    return np.asarray(nnx.jit(lambda layer, x: layer(x)[0])(layer, make_tokens()))


def arrays_of(layer):
    return {k: np.asarray(x) for k, x in nnx.to_pure_dict(nnx.state(layer)).items()}


def assert_same_tensors(got, wanted):
    assert sorted(got) == sorted(wanted)
    for key, x in wanted.items():
        assert_same_bits(got[key], x, key)


@pytest.mark.parametrize("transposed", quick.params([False, True], [False]))
@pytest.mark.parametrize("n_ranks", quick.params([1, 4, 8], [4]))
@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_layer_does_what_its_model_defines(name, n_ranks, transposed):
    layout, model, options = MODELS[name]
    tensors = model.tensors(3)
    layer = abstract_layer({"ep": n_ranks}, transposed=transposed, **options)
    layout.load(layer, tensors, 3)
    assert_close(outputs(layer), model.results(tensors, 3, make_tokens()), 1e-5)
    experts = layer.gate_up[...].sharding.spec[0]
    assert experts == "ep" and layer.router[...].sharding.is_fully_replicated


def test_scores_are_normalized_as_the_config_says():
    model = Qwen3(normalizes=False)
    model.config["num_local_experts"] = model.config.pop("num_experts")  # as transformers 5 does
    layout, _, options = layers_of(model)
    layer = abstract_layer({"ep": 4}, **options)
    layout.load(layer, model.tensors(3), 3)
    assert_close(outputs(layer), model.results(model.tensors(3), 3, make_tokens()), 1e-5)


def test_models_without_a_layout_raise():
    with pytest.raises(ValueError, match="model_type must be one of qwen3_moe, .* got 'llama4'"):
        checkpoints.from_config({"model_type": "llama4"})


@pytest.mark.parametrize("transposed", quick.params([False, True], [True]))
@pytest.mark.parametrize("name", MODELS)
def test_what_is_saved_has_the_bits_that_were_loaded(name, transposed):
    layout, model, options = MODELS[name]
    tensors = model.tensors(0)
    axes = {"dp": 2, "ep": 4}
    layer = abstract_layer(
        axes, transposed=transposed, fsdp_axis="dp", param_dtype=jnp.bfloat16, **options
    )
    layout.load(layer, tensors, 0)
    assert_same_tensors(dict(layout.save(layer, 0)), tensors)
    wide = abstract_layer(axes, transposed=not transposed, **options)
    layout.load(wide, tensors, 0)
    assert_same_tensors(dict(layout.save(wide, 0, dtype=jnp.bfloat16)), tensors)
    assert dict(layout.save(wide, 5)).keys() == model.tensors(5).keys()


@pytest.mark.parametrize("name", quick.params(MODELS, ["deepseek_v3"]))
def test_stacked_layers_hold_what_each_layer_alone_holds(name):
    """The layers 1 and 2 of the checkpoint, with an axis of layers before E."""
    layout, model, options = MODELS[name]
    tensors = model.tensors(1) | model.tensors(2)
    stacked = abstract_layer({"ep": 4}, n_layers=2, **options)
    layout.load(stacked, tensors, range(1, 3))
    got = arrays_of(stacked)
    for i in range(2):
        alone = abstract_layer({"ep": 4}, **options)
        layout.load(alone, tensors, i + 1)
        assert_same_tensors({key: x[i] for key, x in got.items()}, arrays_of(alone))
    assert stacked.gate_up[...].sharding.spec[:2] == (None, "ep")
    saved = dict(layout.save(stacked, (1, 2), dtype=jnp.bfloat16))
    assert_same_tensors(saved, tensors)
    numbers = [key.split(".")[2] for key in saved]
    assert numbers == sorted(numbers)  # layer by layer


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("transposed", quick.params([False, True], [True]))
def test_weights_in_fp8_are_multiplied_by_their_scales(name, transposed):
    layout, model, options = MODELS[name]
    codes, numbers = in_fp8(model.tensors(0))
    axes = {"dp": 2, "ep": 4}
    layer = abstract_layer(axes, transposed=transposed, fsdp_axis="dp", **options)
    layout.load(layer, codes, 0)
    assert_close(outputs(layer), model.results(numbers, 0, make_tokens()), 1e-5)
    saved = dict(layout.save(layer, 0))
    assert saved.keys() == numbers.keys()  # without scales
    for key, x in numbers.items():
        assert_same_bits(saved[key], x.astype(np.float32), key)


@pytest.mark.parametrize("n_layers", [None, 2])
def test_codes_are_loaded_and_saved_as_they_are(n_layers):
    """After `quantize_experts`; the shared expert, which has no codes, is multiplied out."""
    layout, model, options = MODELS["deepseek_v3"]
    options = {**options, "fp8_matmuls": True, "codes": True, "n_layers": n_layers}
    codes, numbers = in_fp8(model.tensors(0) | model.tensors(1))
    layer = abstract_layer({"ep": 4}, FP8, **options)
    numbered = 1 if n_layers is None else (0, 1)
    layout.load(layer, codes, numbered)
    saved = dict(layout.save(layer, numbered))
    own = "model.layers.1.mlp.experts." if n_layers is None else ".experts."
    experts = {key: x for key, x in saved.items() if ".experts." in key}
    assert_same_tensors(experts, {key: x for key, x in codes.items() if own in key})
    if n_layers is None:
        assert_close(outputs(layer), model.results(numbers, 1, make_tokens()), 0.06)


def test_experts_in_mxfp4_are_dequantized():
    layout, model, options = MODELS["gpt_oss"]
    blocks, numbers = in_mxfp4(model.tensors(0))
    axes = {"dp": 2, "ep": 4}
    layer = abstract_layer(axes, fsdp_axis="dp", param_dtype=jnp.bfloat16, **options)
    layout.load(layer, blocks, 0)
    wanted = {key: x.astype(ml_dtypes.bfloat16) for key, x in numbers.items()}
    saved = dict(layout.save(layer, 0))
    assert_same_tensors(saved, wanted)
    transposed = abstract_layer({"ep": 4}, transposed=True, **options)
    layout.load(transposed, blocks, 0)
    assert_close(outputs(transposed), model.results(numbers, 0, make_tokens()), 1e-5)
    again = abstract_layer({"ep": 4}, transposed=True, **options)
    layout.load(again, saved, 0)
    assert_same_tensors(arrays_of(again), arrays_of(transposed))


class Recorded:
    """A tensor as safetensors gives it, which has `get_shape` and takes slices alone."""

    def __init__(self, x, taken):
        self.x, self.taken = x, taken

    def get_shape(self):
        return list(self.x.shape)

    def __getitem__(self, index):
        assert all(type(each.start) is type(each.stop) is int for each in index)
        self.taken.append(self.x[index].size)
        return self.x[index]


@pytest.mark.parametrize("n_layers", [None, 2])
@pytest.mark.parametrize("name", quick.params(MODELS, ["gpt_oss"]))
def test_each_number_is_read_once_in_slices_no_larger_than_a_shard(name, n_layers):
    """Replicas get the same shard. GPT-OSS and DeepSeek-V3 are quantized, as they are published."""
    layout, model, options = MODELS[name]
    tensors = model.tensors(0) | model.tensors(1)
    if name in ("deepseek_v3", "gpt_oss"):
        tensors, _ = (in_fp8 if name == "deepseek_v3" else in_mxfp4)(tensors)
    if n_layers is None:
        tensors = {k: x for k, x in tensors.items() if k.startswith("model.layers.1.")}
    taken = []
    recorded = {key: Recorded(x, taken) for key, x in tensors.items()}
    layer = abstract_layer({"dp": 2, "ep": 4}, n_layers=n_layers, **options)
    layout.load(layer, recorded, 1 if n_layers is None else (0, 1))
    assert max(taken) <= H * 2 * F  # an expert
    assert sum(taken) == sum(x.size for x in tensors.values())
    assert len(layer.gate_up[...].addressable_shards) == 8


def test_any_sharding_will_do():
    """Also one that splits gate from up, layers, and blocks that share a scale."""
    layout, model, options = MODELS["gpt_oss"]
    blocks, _ = in_mxfp4(model.tensors(0) | model.tensors(1))
    layers = [abstract_layer({"ep": 8}, n_layers=2, **options) for _ in range(2)]
    mesh = make_mesh({"a": 2, "b": 4})
    for spec in (jax.P("a", None, "b"), jax.P(None, "a", None, "b"), jax.P()):
        sharding = jax.NamedSharding(mesh, spec)
        for name in ("gate_up", "down"):
            target = nnx.to_pure_dict(nnx.state(layers[1]))[name]
            target = jax.ShapeDtypeStruct(target.shape, target.dtype, sharding=sharding)
            nnx.update(layers[1], {name: target})
        for layer in layers:
            layout.load(layer, blocks, (0, 1))
        assert layers[1].gate_up[...].sharding == sharding
        assert_same_tensors(arrays_of(layers[1]), arrays_of(layers[0]))
        assert_same_tensors(
            dict(layout.save(layers[1], (0, 1))), dict(layout.save(layers[0], (0, 1)))
        )


def test_a_mesh_with_explicit_axes_will_do():
    layout, model, options = MODELS["gpt_oss"]
    kinds = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((4,), ("ep",), kinds, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        layer = abstract_layer(mesh, **options)
        layout.load(layer, model.tensors(0), 0)
        assert layer.gate_up[...].sharding == jax.NamedSharding(mesh, jax.P("ep", None, None))
        assert_same_tensors(dict(layout.save(layer, 0, jnp.bfloat16)), model.tensors(0))


def test_tensors_come_from_files_of_safetensors(tmp_path):
    layout, model, options = MODELS["deepseek_v3"]
    for layer in range(2):
        codes, _ = in_fp8(model.tensors(layer))
        write_safetensors(tmp_path / f"model-{layer}.safetensors", codes)
    tensors = checkpoints.open_safetensors(tmp_path)
    both = in_fp8(model.tensors(0))[0] | in_fp8(model.tensors(1))[0]
    assert_same_tensors(tensors, both)
    one = checkpoints.open_safetensors(tmp_path / "model-1.safetensors")
    assert all(key.startswith("model.layers.1.") for key in one)
    layers = [abstract_layer({"ep": 4}, **options) for _ in range(2)]
    layout.load(layers[0], one, 1)
    layout.load(layers[1], both, 1)
    assert_same_tensors(arrays_of(layers[0]), arrays_of(layers[1]))


def test_other_layouts_are_other_names():
    """An array of all experts for each of gate and up, `[E, n_in, n_out]`, as MaxText has them."""
    _, model, options = MODELS["qwen3_moe"]
    tensors = model.tensors(0)
    stacks = {
        name: np.stack(
            [tensors[f"model.layers.0.mlp.experts.{e}.{name}.weight"].T for e in range(E)]
        )
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    names = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}
    others = {name: stacks[key] for name, key in names.items()}
    others["gate.kernel"] = tensors["model.layers.0.mlp.gate.weight"].T
    layout = checkpoints.Layout(
        prefix="", router="gate.kernel", gate_up=("wi_0", "wi_1"), down="wo"
    )
    for transposed in (False, True):
        layers = [abstract_layer({"ep": 4}, transposed=transposed, **options) for _ in range(2)]
        layout.load(layers[0], others, 0)
        checkpoints.QWEN3_MOE.load(layers[1], tensors, 0)
        assert_same_tensors(arrays_of(layers[0]), arrays_of(layers[1]))
        assert_same_tensors(dict(layout.save(layers[0], 0, jnp.bfloat16)), others)


def test_a_layer_on_devices_is_filled_in_place():
    layout, model, options = MODELS["qwen3_moe"]
    layer = MoE(open_group({"ep": 4}), F, rngs=nnx.Rngs(0), **options)
    before = layer.gate_up
    layout.load(layer, model.tensors(0), 0)
    assert layer.gate_up is before
    assert_close(outputs(layer), model.results(model.tensors(0), 0, make_tokens()), 1e-5)


KEY = "model.layers.0.mlp.experts.7.down_proj.weight"
WRONG = {
    "missing": (
        lambda x: {k: each for k, each in x.items() if k != KEY},
        rf"tensors must have the key '{KEY}'; got 24 others, such as 'model.layers.0.mlp.gate",
    ),
    "shape": (
        lambda x: x | {KEY: x[KEY].T},
        rf"'{KEY}' must have the shape \[256, 128\], by the layer's parameters; got \[128, 256\]",
    ),
    "number of experts": (
        lambda x: x | {"model.layers.0.mlp.gate.weight": np.ones((16, H), np.float32)},
        r"must have the shape \[8, 256\], by the layer's parameters; got \[16, 256\]",
    ),
    "dtype": (
        lambda x: x | {KEY: x[KEY].astype(np.int8)},
        rf"'{KEY}' must be floating-point numbers of 16 bits or more, .* got int8",
    ),
    "no scales": (
        lambda x: x | {KEY: x[KEY].astype(ml_dtypes.float8_e4m3fn)},
        rf"tensors must have the key '{KEY}_scale_inv'",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_tensors_that_do_not_fit_raise(what):
    layout, model, options = MODELS["qwen3_moe"]
    change, message = WRONG[what]
    with pytest.raises(ValueError, match=message):
        layout.load(abstract_layer({"ep": 4}), change(model.tensors(0)), 0)


def test_layers_that_do_not_fit_raise():
    layout, model, _ = MODELS["qwen3_moe"]
    tensors = model.tensors(0)
    layer = abstract_layer({"ep": 4}, logit_bias=True)
    for call in (lambda: layout.load(layer, tensors, 0), lambda: layout.save(layer, 0)):
        with pytest.raises(
            ValueError, match=r"must have the parameters router, gate_up, down; got"
        ):
            call()
    with pytest.raises(ValueError, match="must have interleaved=False; got True"):
        layout.load(abstract_layer({"ep": 4}, interleaved=True), tensors, 0)
    with pytest.raises(TypeError, match=r"Layout.load: moe must be an nnx.MoE; got dict"):
        layout.load({}, tensors, 0)
    for n_layers, numbers, wanted in ((None, [0], "one number"), (2, 0, "2 numbers")):
        with pytest.raises(ValueError, match=rf"layers must be {wanted}.*; got"):
            layout.load(abstract_layer({"ep": 4}, n_layers=n_layers), tensors, numbers)
    codes = abstract_layer({"ep": 4}, FP8, codes=True, fp8_matmuls=True)
    with pytest.raises(ValueError, match="must be float8_e4m3fn, as the layer's experts are codes"):
        layout.load(codes, tensors, 0)
    concrete = MoE(open_group({"ep": 4}), F, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="Call it outside of jax.jit"):
        nnx.jit(lambda layer: layout.load(layer, tensors, 0))(concrete)


@pytest.mark.multiprocess
def test_each_process_reads_and_saves_its_own_experts():
    run_processes(2, "checkpoint_checks:check", n_local_devices=2)


def test_files_that_are_not_of_safetensors_raise(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"must have files \*.safetensors"):
        checkpoints.open_safetensors(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff" * 16)
    with pytest.raises(ValueError, match="must be a file of safetensors; its header is damaged"):
        checkpoints.open_safetensors(path)
    write_safetensors(path, {"x": np.ones(2, np.float32)})
    path.write_bytes(path.read_bytes().replace(b"F32", b"X32"))
    with pytest.raises(ValueError, match="must have numbers of a dtype out of .*; got X32"):
        checkpoints.open_safetensors(path)
