"""Combinations of options that could switch off training or do nothing: docs/layers.md, by row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_ep
import quick
from jax_ep.nnx import MoE
from jax_ep.router import RouterConfig, route
from nnx_layers import masked_step, open_group

pytestmark = pytest.mark.usefixtures("one_process", "float32_matmuls")
E, K, H, F, T = 4, 2, 16, 8, 12
GROUPS = {"n_expert_groups": 2, "topk_expert_groups": 2}
NORMALIZE_ONE = "normalize must be None or False with top_k=1, .* score of the chosen expert; got T"
NO_FACTOR = "capacity_factor must be given with capacity_axis or on_limit"
# Options of the router, of the config and of the module; then the message.
REFUSED = {
    "softmax, normalized": ({"normalize": True}, {"top_k": 1}, {}, NORMALIZE_ONE),
    "sigmoid, normalized": (
        {"scores": "sigmoid", "normalize": True},
        {"top_k": 1},
        {},
        NORMALIZE_ONE,
    ),
    "no scaling": ({"scaling": 0}, {}, {}, "scaling must be .* not 0 in float32; got 0"),
    "scaling to 0": ({"scaling": 1e-50}, {}, {}, "scaling must be .* got 1e-50"),
    "scaling to infinity": ({"scaling": -1e39}, {}, {}, r"scaling must be .* got -1e\+39"),
    "bias, all chosen": ({}, {"top_k": E}, {"router_bias": True}, "router_bias must be False with"),
    "axis, no factor": ({}, {}, {"capacity_axis": "ep"}, NO_FACTOR),
    "limit, no factor": ({}, {}, {"on_limit": "raise"}, NO_FACTOR),
    "codes as parameters": ({}, {}, {"param_dtype": jnp.float8_e4m3fn}, "of 16 bits or more"),
    "shared, not fused": (
        {},
        {"fused_shared_expert": True},
        {"shared_size": 2 * F},
        "shared_size must be expert_size with fused_shared_expert",
    ),
    "fused, none": ({}, {"fused_shared_expert": True}, {"shared_size": 0}, "shared_size must be"),
    "FP8, other format": ({}, {}, {"fp8_matmuls": True}, "fp8_matmuls needs combine_dtype"),
    "FP8 in gradients": ({}, {}, {"fp8_gradients": True}, "fp8_gradients needs fp8_matmuls=True"),
    "sharded twice": ({}, {}, {"fsdp_axis": "ep"}, "fsdp_axis must be .* not the group's"),
}
# Those that change neither results nor gradients.
HARMLESS = {
    "groups that are all chosen": (GROUPS, {}, {}),
    "group scores without groups": ({"group_scores": "top2"}, {}, {}),
    "the default, named": ({"normalize": True}, {}, {}),
    "more room than choices": ({}, {}, {"capacity_factor": E / K, "on_limit": "raise"}),
    "a bias that nothing moves": ({}, {}, {"router_bias": True}),
    "one sequence": ({}, {}, {"balance_per_sequence": True}),
    "a shared expert of nothing": ({}, {}, {"shared_size": 0}),
    "axes of size 1": (
        {},
        {},
        {"capacity_axis": "one", "capacity_factor": float(E), "fsdp_axis": "one"},
    ),
    "settings of other transports": ({}, {"n_sms": 8}, {}),
    "an error that no row raises": ({}, {"on_drop": "raise"}, {}),
}


def make(router=None, config=None, options=None):
    sizes = {"n_experts": E, "top_k": K, "hidden_size": H, "max_tokens_per_rank": T}
    group = open_group("auto", {"ep": 2, "one": 1}, **sizes | (config or {}))
    return MoE(group, F, router=RouterConfig(**router or {}), rngs=nnx.Rngs(0), **options or {})


def tokens_of(n=T, seed=0):
    return jax.random.normal(jax.random.key(seed), (n, H))


@nnx.jit
def step(layer, tokens):
    def loss(layer):
        output, report = layer(tokens)
        return jnp.sum(jnp.sin(output)) + report.balance_loss, output

    return nnx.grad(loss, has_aux=True)(layer)


@pytest.mark.parametrize("name", REFUSED)
def test_combinations_without_a_meaning_are_refused(name):
    *options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        make(*options)


@pytest.fixture(scope="module")
def plain():
    return step(make(), tokens_of())


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", quick.params(HARMLESS, {"group scores without groups", "axes of size 1"})
)
def test_combinations_without_an_effect_change_nothing(name, plain):
    grads, output = step(make(*HARMLESS[name]), tokens_of())
    np.testing.assert_array_equal(output, plain[1])
    got, wanted = nnx.to_pure_dict(grads), nnx.to_pure_dict(plain[0])
    for param, grad in wanted.items():
        np.testing.assert_allclose(got[param], grad, rtol=1e-5, atol=1e-6, err_msg=param)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [None, True, False])
@pytest.mark.parametrize("top_k", [1, 2, E])
def test_a_router_that_is_not_refused_is_trained(scores, normalize, top_k):
    config = RouterConfig(scores=scores, normalize=normalize)
    logits, factors = tokens_of()[:, :E], tokens_of(seed=1)[:, :top_k]

    def weigh(logits):
        return (factors * route(config, logits, top_k).topk_weights).sum()

    if normalize and top_k == 1:
        with pytest.raises(ValueError, match=NORMALIZE_ONE):
            weigh(logits)
        return
    assert (jnp.abs(jax.grad(weigh)(logits)).max(axis=-1) > 1e-3).all()
    named = dataclasses.replace(config, normalize=config.normalizes(top_k))
    np.testing.assert_array_equal(
        route(named, logits, top_k).topk_weights, route(config, logits, top_k).topk_weights
    )


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_the_only_weight_of_a_token_is_the_score_of_its_expert(scores):
    """Switch Transformer, section 2.1; the loss reaches the router."""
    routes = route(RouterConfig(scores=scores), tokens_of()[:, :E], 1)
    np.testing.assert_array_equal(routes.topk_weights[:, 0], routes.scores.max(axis=-1))
    grads, _ = step(make({"scores": scores}, {"top_k": 1}), tokens_of())
    size = {name: np.abs(x).max() for name, x in nnx.to_pure_dict(grads).items()}
    assert size["router"] > 1e-3 * size["down"]


def test_one_expert_leaves_nothing_to_route():
    """Its softmax is 1; a sigmoid scales its result."""
    logits = tokens_of()[:, :1]
    np.testing.assert_array_equal(route(RouterConfig(), logits, 1).topk_weights, 1)
    gates = route(RouterConfig(scores="sigmoid"), logits, 1).topk_weights
    np.testing.assert_allclose(gates, jax.nn.sigmoid(logits), rtol=1e-6)


@pytest.mark.parametrize("factor", [1.1, np.float32(1.1), 0.29], ids=repr)
def test_a_capacity_is_exact_for_the_decimal_factor(factor):
    """In floating point, 1.1 * 100 / 2 is above 55; np.float32(1.1) is above 1.1."""
    sizes = {"n_experts": 2, "top_k": 1, "max_tokens_per_rank": 100}
    layer = make({}, sizes, {"capacity_factor": factor})
    tokens = jnp.ones((200, H))  # equal, so that all choose one expert
    _, report = nnx.jit(lambda layer: layer(tokens))(layer)
    assert 100 - report.n_limited / 2 == (15 if factor == 0.29 else 55)


FP8 = {"token_format": jax_ep.BlockwiseFP8(), "combine_dtype": jnp.bfloat16}
PADDED = {
    "plain": {},
    "FP8": FP8 | {"hidden_size": 128},
    "fused shared expert": {"fused_shared_expert": True},
    "same tokens": {"skip_a2a": True},
}


@pytest.mark.usefixtures("one_process")
def test_padding_stays_zero_whatever_experts_make_of_zeros():
    config = PADDED["fused shared expert"]

    def ones(dispatched, gate_up, down, **options):
        return jnp.ones_like(dispatched.tokens)

    layer = make({}, config, {"expert_fn": ones})
    mask = jnp.arange(T) < 5
    output, _ = nnx.jit(layer)(tokens_of(), mask)
    assert output[mask].all() and not output[~mask].any()


@pytest.mark.thorough
@pytest.mark.parametrize("name", quick.params(PADDED, {"FP8", "fused shared expert"}))
def test_padding_may_hold_anything(name):
    """Of masked tokens: outputs and gradients are zero, and those of all else as with zeros."""
    options = {"logit_bias": True, "shared_size": F, "balance_per_sequence": True}
    layer = make({"scores": "sigmoid"}, PADDED[name] | {"max_tokens_per_rank": 24}, options)
    x = jax.random.normal(jax.random.key(0), (4, 6, layer.group.config.hidden_size))
    mask = jnp.arange(6) < jnp.array([6, 3, 0, 5])[:, None]

    step = masked_step(mask)
    zeros, *others = [
        step(layer, jnp.where(mask[..., None], x, value)) for value in (0, jnp.nan, jnp.inf, 1e38)
    ]
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, zeros)
    (_, of_tokens), (output, _) = zeros
    assert not output[~mask].any() and not of_tokens[~mask].any()
    assert np.isfinite(output).all() and output[mask].any()


def test_a_model_is_tabulated_with_its_report():
    """`nnx.tabulate` takes tuples in tuples apart by position; paths still have the names."""

    class Block(nnx.Module):
        def __init__(self):
            self.moe = make(options={"router_bias": True})

        def __call__(self, x):
            output, report = self.moe(x)
            return x + output, {"moe": [report]}

    text = nnx.tabulate(Block(), tokens_of(), console_kwargs={"width": 200})
    assert "gate_up" in text and "RouterBias" in text
    report = nnx.eval_shape(lambda layer, x: layer(x)[1], make(), tokens_of())
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(report)]
    assert paths == [f".{name}" for name in report._fields]
    assert type(report) is type(jax.tree.map(lambda x: x, report))


def test_a_transfer_guard_allows_what_happens_between_steps():
    placement = jax_ep.ExpertPlacement(np.arange(E), 2)
    layer = make(options={"router_bias": True, "placement": placement})
    run = nnx.jit(lambda layer, x, mask: layer(x, mask))
    x, mask = tokens_of(), jnp.ones(T, bool)
    by_token = jax.NamedSharding(layer.group.mesh, jax.P(("ep", "one")))
    x, mask = jax.device_put((x, mask), by_token)
    with jax.transfer_guard("disallow"):
        for rate in (0.5, np.float32(0.25)):
            _, report = run(layer, x, mask)
            layer.update_bias(report.expert_load, rate)
            logical = jax_ep.rebalance(report.expert_load, 2, 0)
            layer.placement.set(jax_ep.ExpertPlacement(logical, 2))
        masked = jax_ep.ExpertPlacement(logical, 2).mask_ranks(np.array([True, False]))
        layer.placement.set(masked)
        run(layer, x, mask)
    assert set(np.abs(np.asarray(layer.router_bias[...]))) <= {0, 0.25, 0.5, 0.75}
    assert np.asarray(layer.router_bias[...]).any()


def test_a_transfer_guard_allows_quantizing_experts():
    group = open_group("auto", {"ep": 2}, **FP8)
    layer = MoE(group, 128, fp8_matmuls=True, rngs=nnx.Rngs(0))
    with jax.transfer_guard("disallow"):
        layer.quantize_experts()
