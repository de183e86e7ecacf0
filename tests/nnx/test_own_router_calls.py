"""Calls of `nnx.MoE` with a router of the user's: what they cost, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import P

import jax_ep
from jax_ep.nnx import MoE
from jax_ep.router import RouterConfig, Routes
from nnx_layers import assert_close, host_program, make_mesh, masked_step, open_group
from routed_layers import LENGTH, SIZES, B, E, F, H, K, call, make, make_tokens

pytestmark = pytest.mark.usefixtures("one_process", "float32_matmuls")


def plain_route(layer, tokens, mask):
    return layer.route(layer.router_logits(tokens))


V3 = RouterConfig(scores="sigmoid", n_expert_groups=4, topk_expert_groups=2, group_scores="top2")


@pytest.mark.parametrize("explicit", [False, True])
def test_the_layers_own_route_gives_the_same_bits(explicit):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    devices = make_mesh({"dp": 2, "ep": 4}).devices.flat
    mesh = jax.make_mesh((2, 4), ("dp", "ep"), (kind,) * 2, devices=[*devices])
    group = open_group("auto", None, mesh=mesh, **SIZES)
    options = {"router": V3, "router_bias": True, "logit_bias": True, "capacity_factor": 1.0}
    tokens = jax.device_put(make_tokens(), jax.NamedSharding(mesh, P(("dp", "ep"))))
    results = []
    for router_fn in (None, plain_route):
        layer = MoE(group, F, router_fn=router_fn, rngs=nnx.Rngs(0), **options)
        layer.router_bias[...] += jnp.linspace(-0.2, 0.2, E)
        results.append(call(layer, tokens))
    jax.tree.map(np.testing.assert_array_equal, *results)


LAYOUTS = {
    "same tokens": ({"skip_a2a": True}, {}),
    "by sequence": ({}, {"token_axes": P("dp", "ep"), "balance_per_sequence": True}),
    "fused": ({"fused_shared_expert": True}, {}),
    "other axes": ({}, {"token_axes": "ep"}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layers_own_route_follows_the_tokens(name):
    config, options = LAYOUTS[name]
    step = masked_step(jnp.arange(LENGTH) < jnp.arange(B)[:, None])
    axes = {"dp": 2, "ep": 4}
    layers = [make(config, axes, router_fn=each, **options) for each in (None, plain_route)]
    (usual, wanted), (grads, got) = [step(layer, make_tokens()) for layer in layers]
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    jax.tree.map(assert_close, grads, usual)


def test_the_layers_own_route_gathers_nothing():
    layer = make(axes={"dp": 2, "ep": 4}, router=V3, router_bias=True, router_fn=plain_route)
    text = host_program(layer, make_tokens())
    assert " all-reduce" in text  # of the report
    for other in ("all-gather", "all-to-all", "reduce-scatter", "collective-permute"):
        assert other not in text


def test_routes_of_padding_may_hold_anything():
    """A router that divides by what padding has none of."""

    def by_norm(layer, tokens, mask):
        unit = tokens / jnp.linalg.norm(tokens, axis=-1, keepdims=True)
        return layer.route(layer.router_logits(unit))

    layer, tokens = make(router_fn=by_norm), make_tokens()
    mask = jnp.arange(LENGTH) < jnp.arange(B)[:, None]

    @nnx.jit
    def step(layer, tokens, mask):
        def loss(layer):
            output, report = layer(tokens, mask)
            return jnp.sum(output) + report.balance_loss + report.z_loss, output

        return nnx.grad(loss, has_aux=True)(layer)

    grads, output = step(layer, tokens, mask)
    assert not output[~mask].any() and np.isfinite(output).all()
    whole = call(layer, tokens)[0]
    assert_close(output, np.where(mask[..., None], whole, 0))
    assert np.isfinite(grads["gate_up"][...]).all()


@pytest.mark.parametrize(
    "routes, error, message",
    [
        (lambda ids: (ids, None), TypeError, r"must return jax_ep.router.Routes\(.*got tuple"),
        (lambda ids: Routes(ids[..., :1], None), ValueError, r"topk_ids .* K=2\]; got \(8, 4, 1\)"),
        (lambda ids: Routes(ids[0], None), ValueError, r"topk_ids .* \[8, 4, K=2\]; got \(4, 2\)"),
        (
            lambda ids: Routes(ids.astype(float), None),
            ValueError,
            "topk_ids must be integers; got float32",
        ),
        (lambda ids: Routes(ids, ids), ValueError, "topk_weights must be floating-point numbers"),
        (
            lambda ids: Routes(ids, None, ids.astype(float)),
            ValueError,
            r"scores must .* E=8\]; got",
        ),
        (lambda ids: Routes(ids, None, None, ids), ValueError, r"logits must .* E=8\]; got"),
        (lambda ids: Routes(None, None), ValueError, "topk_ids must be an array; got None"),
    ],
)
def test_routes_are_checked(routes, error, message):
    layer = make(router_fn=lambda *_: routes(jnp.zeros((B, LENGTH, K), jnp.int32)))
    with pytest.raises(error, match=f"^nnx.MoE: router_fn:? {message}"):
        layer(make_tokens())


def test_further_arguments_need_a_router_fn():
    with pytest.raises(TypeError, match="further arguments are for router_fn.*; got rngs, words"):
        make()(make_tokens(), rngs=nnx.Rngs(0), words=None)
    with pytest.raises(TypeError, match="router_fn must be a function or None; got 'hash'"):
        make(router_fn="hash")


def test_variables_of_experts_have_an_axis_of_experts():
    class Scaled(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.ones((H,)))

    Scaled.__call__ = jax_ep.expert_mlp
    with pytest.raises(ValueError, match=r"must have the shape \[E=8, ...\]; got \(32,\) at .*sca"):
        make(expert_fn=Scaled())(make_tokens())


@pytest.mark.parametrize("config", [{}, {"top_k": 1, "fused_shared_expert": True}])
def test_a_gate_on_the_input_needs_one_choice_and_no_fused_expert(config):
    with pytest.raises(ValueError, match="weights_on_input needs top_k=1, .* got top_k="):
        make(config, weights_on_input=True)
    layer = make({"top_k": 1}, weights_on_input=True, shared_size=F)
    layer.group, layer.top_k = make(config).group, (config.get("top_k", K))
    with pytest.raises(ValueError, match="weights_on_input needs top_k=1"):
        layer(make_tokens())
