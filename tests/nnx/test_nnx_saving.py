"""A model with `jax_ep.nnx.MoE`, saved as arrays and restored on another mesh; its copies."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from jax import P

import jax_ep
from jax_ep.nnx import MoE
from nnx_layers import F, S, make_layer, make_mesh, make_tokens, open_group

pytestmark = pytest.mark.usefixtures("one_process", "float32_matmuls")
OPTIONS = {"router_bias": True, "shared_size": S}
FORMATS = {
    "pickle": (pickle.dumps, lambda target, data: pickle.loads(data)),
    "flax": (serialization.to_bytes, serialization.from_bytes),
}


def outputs(layer):
    return np.asarray(nnx.jit(lambda layer, x: layer(x)[0])(layer, make_tokens()))


def with_optimizer(layer):
    return layer, nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)


@pytest.mark.thorough
@pytest.mark.parametrize("name", FORMATS)
@jax.numpy_dtype_promotion("standard")  # optax needs it
def test_arrays_are_restored_on_another_mesh(name):
    dump, load = FORMATS[name]
    saved = make_layer("auto", **OPTIONS)
    data = dump(nnx.to_pure_dict(nnx.state(with_optimizer(saved))))
    group = open_group("auto", {"ep": 2})

    def create():
        return with_optimizer(MoE(group, F, rngs=nnx.Rngs(1), **OPTIONS))

    graph, target = nnx.get_abstract_model(create, group.mesh)
    empty = nnx.to_pure_dict(target)
    shardings = jax.tree.map(lambda x: x.sharding, empty)
    nnx.replace_by_pure_dict(target, jax.device_put(load(empty, data), shardings))
    layer, optimizer = nnx.merge(graph, target)
    assert layer.gate_up[...].sharding == jax.NamedSharding(group.mesh, P("ep", None, None))
    moments = nnx.state(optimizer, lambda path, _: path[-1] == "gate_up")
    assert [x.sharding.spec[0] for x in jax.tree.leaves(moments)] == ["ep", "ep"]
    np.testing.assert_allclose(outputs(layer), outputs(saved), rtol=1e-5, atol=1e-5)


def test_codes_of_experts_are_restored_on_the_devices_that_hold_them():
    config = {"token_format": jax_ep.BlockwiseFP8(), "combine_dtype": jnp.bfloat16}

    def create(n_ranks):
        layer = make_layer("auto", axes={"ep": n_ranks}, config=config, fp8_matmuls=True)
        layer.quantize_experts()
        return layer

    saved = create(4)
    arrays = nnx.to_pure_dict(nnx.state(saved))
    graph, target = nnx.get_abstract_model(lambda: create(2), make_mesh({"ep": 2}))
    shardings = jax.tree.map(lambda x: x.sharding, nnx.to_pure_dict(target))
    for name in ("gate_up", "down", "gate_up_scales", "down_scales"):
        assert shardings[name].spec[0] == "ep", name
    nnx.replace_by_pure_dict(target, jax.device_put(jax.tree.map(np.asarray, arrays), shardings))
    restored = nnx.merge(graph, target)
    error = np.abs(outputs(restored) - outputs(saved)).max()
    assert error < 0.02 * np.abs(outputs(saved)).max()


@pytest.mark.thorough
@pytest.mark.parametrize("copied", [copy.deepcopy, nnx.clone])
def test_a_copy_has_the_group_and_parameters_of_its_own(copied):
    layer = make_layer("auto", **OPTIONS)
    wanted, other = outputs(layer), copied(layer)
    assert other.group is layer.group
    np.testing.assert_array_equal(outputs(other), wanted)
    other.down[...] *= 2
    np.testing.assert_array_equal(outputs(layer), wanted)


def test_a_shallow_copy_shares_the_parameters():
    layer = make_layer("auto")
    other = copy.copy(layer)
    assert other is not layer
    assert other.down is layer.down
    np.testing.assert_array_equal(outputs(other), outputs(layer))
