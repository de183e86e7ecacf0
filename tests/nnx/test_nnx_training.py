"""jax_ep.nnx.MoE in training and evaluation: accumulated gradients, capacity, groups, codes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_ep
from jax_ep.nnx import ExpertCodes, MoE
from nnx_layers import assert_close, open_group

pytestmark = pytest.mark.usefixtures("one_process", "float32_matmuls")
E, K, H, F, B, LENGTH = 4, 2, 32, 16, 4, 8
N_LAYERS, N_MICRO = 2, 3
NO_NAME = {nnx.PARTITION_NAME: None}


def make(config=None, **options):
    sizes = {"n_experts": E, "top_k": K, "hidden_size": H, "max_tokens_per_rank": B * LENGTH}
    group = open_group("auto", {"ep": 2}, **sizes | (config or {}))
    return MoE(group, F, rngs=nnx.Rngs(0), **options)


def make_stacked(group, size=F, **options):
    @nnx.split_rngs(splits=N_LAYERS)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata=NO_NAME)
    def create(rngs):
        return MoE(group, size, rngs=rngs, **options)

    return create(nnx.Rngs(0))


@nnx.scan(in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0), transform_metadata=NO_NAME)
def apply(layer, x):
    output, report = layer(x)
    return x + output, report


def make_batches(n=N_MICRO, size=H):
    return jax.random.normal(jax.random.key(1), (n, B, LENGTH, size))


call = nnx.jit(lambda layer, *args: layer(*args))


def objective(layers, x):
    output, reports = apply(layers, x)
    return jnp.mean(jnp.sin(output)), reports.expert_load


@pytest.mark.thorough
def test_gradients_are_accumulated_by_scan():
    """`copy=True`: variables that no gradient reaches, such as the bias, are of an outer trace."""
    layers = make_stacked(make().group, router_bias=True)

    @nnx.jit
    def step(layers, batches):
        graph, params, rest = nnx.split(layers, nnx.Param, ...)

        def add(total, x):
            loss = lambda params: objective(nnx.merge(graph, params, rest, copy=True), x)  # noqa: E731
            grads, load = jax.grad(loss, has_aux=True)(params)
            return jax.tree.map(jnp.add, total, grads), load

        grads, loads = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches)
        layers.update_bias(loads.sum(axis=0), rate=0.5)
        return grads, loads

    single = nnx.jit(lambda layers, x: nnx.grad(objective, has_aux=True)(layers, x))
    wanted = [single(layers, x) for x in make_batches()]
    grads, loads = step(layers, make_batches())
    np.testing.assert_array_equal(loads, np.stack([load for _, load in wanted]))
    for name, grad in nnx.to_pure_dict(grads).items():
        total = sum(np.asarray(nnx.to_pure_dict(each)[name]) for each, _ in wanted)
        assert_close(grad, total)
    load = np.asarray(loads).sum(axis=0)
    moved = 0.5 * np.sign(load.mean(axis=1, keepdims=True) - load)
    np.testing.assert_array_equal(layers.router_bias[...], moved)


@pytest.mark.thorough
@jax.numpy_dtype_promotion("standard")  # optax needs it
def test_gradients_are_accumulated_by_an_optimizer():
    """The bias moves as often as the parameters do, by the loads of all calls since."""
    layer, batches = make(router_bias=True), make_batches(2 * N_MICRO)
    transform = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=N_MICRO)
    optimizer = nnx.Optimizer(layer, transform, wrt=nnx.Param)

    @nnx.jit
    def step(layer, optimizer, load, x):
        def loss(layer):
            output, report = layer(x)
            return jnp.mean(jnp.sin(output)), report.expert_load

        grads, new = nnx.grad(loss, has_aux=True)(layer)
        optimizer.update(layer, grads)
        is_last = optimizer.opt_state.mini_step[...] == 0
        load += new
        layer.update_bias(load, rate=jnp.where(is_last, 0.5, 0))
        return jnp.where(is_last, 0, load)

    load, totals, bias = jnp.zeros(E, jnp.int32), np.zeros(E, int), np.zeros(E)
    before = np.asarray(layer.gate_up[...])
    for i, x in enumerate(batches, 1):
        totals = totals + np.asarray(call(layer, x)[1].expert_load)
        load = step(layer, optimizer, load, x)
        if i % N_MICRO == 0:
            bias += 0.5 * np.sign(totals.mean() - totals)
            totals = np.zeros(E, int)
        np.testing.assert_array_equal(load, totals)
        np.testing.assert_array_equal(layer.router_bias[...], bias)
        assert (layer.gate_up[...] != before).any() == (i >= N_MICRO)
    assert bias.any()


def set_attributes(layer, is_eval):
    layer.eval() if is_eval else layer.train()
    return layer


MODES = {
    "in place": set_attributes,
    "view": lambda layer, is_eval: nnx.view(layer, deterministic=is_eval),
}


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_lifts_the_capacity(mode):
    """Also where drops would raise, as the capacity is no limit then."""
    options = {"capacity_factor": 0.5, "on_limit": "raise", "capacity_axis": "ep"}
    layer, (x,) = make(), make_batches(1)
    wanted, _ = call(layer, x)
    limited = make(capacity_factor=0.5)
    assert call(limited, x)[1].n_limited > 0
    layer = MODES[mode](make(**options), True)
    output, report = call(layer, x)
    np.testing.assert_array_equal(output, wanted)
    assert report.n_limited == 0
    limited = MODES[mode](MODES[mode](limited, True), False)
    assert call(limited, x)[1].n_limited > 0


def test_a_group_with_another_top_k_is_no_accident():
    layer, (x,) = make(), make_batches(1)
    layer.group = make({"top_k": 3}).group
    with pytest.raises(ValueError, match=r"layer's top_k=2; got 3. .* set layer.top_k = 3"):
        layer(x)
    layer.top_k = 3
    assert call(layer, x)[1].topk_ids.shape == (B, LENGTH, 3)


@pytest.mark.thorough
@pytest.mark.parametrize("transposed", [False, True])
def test_experts_of_stacked_layers_are_quantized_once(transposed):
    """With the bits of quantizing in each call."""
    config = {"hidden_size": 128, "token_format": jax_ep.BlockwiseFP8()}
    group = make(config | {"combine_dtype": jnp.bfloat16}).group
    layers = make_stacked(group, 128, fp8_matmuls=True, transposed=transposed)
    (x,) = make_batches(1, 128)
    wanted, _ = nnx.jit(apply)(layers, x)
    layers.quantize_experts()
    for name in ("gate_up", "down"):
        codes = getattr(layers, name)
        assert isinstance(codes, ExpertCodes) and codes.dtype == jnp.float8_e4m3fn
        assert codes.sharding.spec[:2] == (None, "ep")
    np.testing.assert_array_equal(nnx.jit(apply)(layers, x)[0], wanted)
