"""The router, against NumPy that goes through tokens one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from harness import make_mesh
from jax_ep.router import RouterConfig, balance_loss, expert_load, route, update_bias, z_loss

T, E, K = 40, 16, 4
CONFIGS = {
    "softmax": RouterConfig(),
    "softmax, not normalized": RouterConfig(normalize=False),
    "sigmoid": RouterConfig(scores="sigmoid"),
    "sigmoid, not normalized": RouterConfig(scores="sigmoid", normalize=False, scaling=0.5),
    "DeepSeek-V2": RouterConfig(
        normalize=False, scaling=16.0, n_expert_groups=4, topk_expert_groups=2
    ),
    "DeepSeek-V3": RouterConfig(
        scores="sigmoid", scaling=2.5, n_expert_groups=4, topk_expert_groups=2, group_scores="top2"
    ),
    "one group": RouterConfig(n_expert_groups=4, topk_expert_groups=1, group_scores="top2"),
}


def logits_and_bias(seed=0, shape=(T, E)):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal(shape).astype(np.float32)
    return logits, (0.3 * rng.standard_normal(shape[-1])).astype(np.float32)


def route_one(config, logits, top_k, bias):
    """Ids and weights of one token, in float64."""
    exp = np.exp(logits.astype(np.float64))
    scores = exp / exp.sum() if config.scores == "softmax" else exp / (1 + exp)
    ranking = scores + bias
    groups = np.split(np.arange(len(logits)), config.n_expert_groups)
    n_best = 2 if config.group_scores == "top2" else 1
    group_scores = [np.sort(ranking[group])[-n_best:].sum() for group in groups]
    chosen = np.argsort(group_scores)[-config.topk_expert_groups :]
    candidates = np.concatenate([groups[i] for i in chosen])
    ids = candidates[np.argsort(-ranking[candidates])][:top_k]
    weights = scores[ids]
    if config.normalizes(top_k):
        weights = weights / weights.sum()
    return ids, weights * config.scaling


def loss_of_one_batch(scores, ids):
    """The expert-level loss of DeepSeek-V2, section 2.2.3, in loops."""
    n_tokens, n_experts = scores.shape
    total = 0.0
    for i in range(n_experts):
        f = n_experts / (ids.shape[1] * n_tokens) * (ids == i).sum()
        total += f * np.mean(scores[:, i])
    return total


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_routes_match_numpy(name, with_bias):
    logits, bias = logits_and_bias()
    routes = route(CONFIGS[name], logits, K, bias if with_bias else None)
    for t in range(T):
        ids, weights = route_one(CONFIGS[name], logits[t], K, bias if with_bias else 0)
        np.testing.assert_array_equal(routes.topk_ids[t], ids)
        np.testing.assert_allclose(routes.topk_weights[t], weights, rtol=1e-5)
    assert routes.topk_ids.dtype == jnp.int32 and routes.topk_weights.dtype == jnp.float32


def test_leading_dimensions_are_kept():
    config = CONFIGS["DeepSeek-V3"]
    logits, bias = logits_and_bias()
    flat = route(config, logits, K, bias)
    shaped = route(config, logits.reshape(5, 8, E), K, bias)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a.reshape(T, -1), b), tuple(shaped), tuple(flat)
    )


def test_a_softmax_over_the_chosen_logits_is_the_normalized_one():
    """As Mixtral and GPT-OSS write it."""
    logits, _ = logits_and_bias()
    chosen, ids = jax.lax.top_k(logits, K)
    routes = route(RouterConfig(), logits, K)
    np.testing.assert_array_equal(routes.topk_ids, ids)
    np.testing.assert_allclose(routes.topk_weights, jax.nn.softmax(chosen), rtol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_of_weights_match_finite_differences(name):
    logits, bias = logits_and_bias(shape=(3, E))
    config = CONFIGS[name]

    def weigh(logits, bias):
        routes = route(config, logits, K, bias)
        return jnp.sum(routes.topk_weights * jnp.arange(1.0, K + 1))

    got, of_bias = jax.grad(weigh, argnums=(0, 1))(logits, bias)
    assert not np.any(of_bias)

    def weigh_in_float64(logits):
        weights = [route_one(config, row, K, bias)[1] for row in logits]
        return np.sum(weights * np.arange(1.0, K + 1))

    step, wanted = 1e-6, np.zeros_like(logits, np.float64)
    for index in np.ndindex(*logits.shape):
        change = np.zeros_like(wanted)
        change[index] = step
        wanted[index] = weigh_in_float64(logits + change) - weigh_in_float64(logits - change)
    np.testing.assert_allclose(got, wanted / (2 * step), atol=1e-3 * config.scaling)


@pytest.mark.parametrize("name", ["softmax", "DeepSeek-V3"])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_balance_loss_matches_its_formula(name, per_sequence):
    logits, bias = logits_and_bias(shape=(5, 8, E))
    routes = route(CONFIGS[name], logits, K, bias)
    scores, ids = np.asarray(routes.scores, np.float64), np.asarray(routes.topk_ids)
    scores = scores / scores.sum(axis=-1, keepdims=True)
    if per_sequence:
        wanted = np.mean([loss_of_one_batch(*pair) for pair in zip(scores, ids, strict=True)])
    else:
        wanted = loss_of_one_batch(scores.reshape(-1, E), ids.reshape(-1, K))
    got = balance_loss(routes.scores, routes.topk_ids, per_sequence=per_sequence)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_balance_loss_is_one_at_balance_and_more_for_a_collapsed_router():
    scores = np.full((E, E), 1 / E, np.float32)
    ids = (np.arange(E)[:, None] + np.arange(K)) % E
    np.testing.assert_allclose(balance_loss(scores, ids), 1, rtol=1e-6)
    logits = np.zeros((T, E), np.float32)
    logits[:, :K] = 9
    routes = route(RouterConfig(), logits, K)
    assert balance_loss(routes.scores, routes.topk_ids) > 0.9 * E / K


@pytest.mark.thorough
@pytest.mark.parametrize("per_sequence", [False, True])
def test_tokens_without_a_choice_do_not_count(per_sequence):
    logits, _ = logits_and_bias(shape=(3, 8, E))
    routes = route(RouterConfig(), logits, K)
    masked = np.array(routes.topk_ids)
    masked[:, 5:] = -1
    args = routes.scores[:, :5], routes.topk_ids[:, :5]
    wanted = balance_loss(*args, per_sequence=per_sequence)
    got = balance_loss(routes.scores, masked, per_sequence=per_sequence)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    np.testing.assert_array_equal(expert_load(masked, E), expert_load(args[1], E))
    empty = balance_loss(routes.scores, np.full_like(masked, -1), per_sequence=per_sequence)
    assert empty == 0


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_the_balance_loss_of_no_tokens_is_zero(per_sequence, shape):
    scores, ids = np.zeros((*shape, E), np.float32), np.zeros((*shape, K), np.int32)
    loss = functools.partial(balance_loss, per_sequence=per_sequence)
    value, gradient = jax.value_and_grad(loss)(jnp.asarray(scores), ids)
    assert value == 0 and gradient.shape == scores.shape


def dense_z_loss(logits):
    """The router z-loss of ST-MoE, equation 5."""
    return jnp.mean(jnp.log(jnp.sum(jnp.exp(logits), axis=-1)) ** 2)


def test_the_z_loss_and_its_gradient_match_the_formula():
    logits, _ = logits_and_bias(shape=(3, 8, E))
    got, grad = jax.value_and_grad(z_loss)(logits)
    wanted, dense_grad = jax.value_and_grad(dense_z_loss)(logits)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    np.testing.assert_allclose(grad, dense_grad, rtol=1e-5)
    assert z_loss(logits.astype(jnp.bfloat16)).dtype == jnp.float32
    # Where exp(logits) overflows.
    np.testing.assert_allclose(z_loss(np.full((2, E), 200.0)), (200 + np.log(E)) ** 2, rtol=1e-6)


def test_the_z_loss_leaves_out_tokens_without_a_choice():
    logits, _ = logits_and_bias()
    ids = np.array(route(RouterConfig(), logits, K).topk_ids)
    ids[5:] = -1
    got, grad = jax.value_and_grad(z_loss)(logits, ids)
    np.testing.assert_allclose(got, dense_z_loss(logits[:5]), rtol=1e-6)
    assert not grad[5:].any() and grad[:5].any()
    assert z_loss(logits, np.full_like(ids, -1)) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("per_sequence", [False, True])
def test_shards_of_a_mesh_get_the_loss_and_load_of_all_tokens(per_sequence, one_process):
    mesh = make_mesh(4, dp=2)
    axes = mesh.axis_names
    logits, _ = logits_and_bias(shape=(16, 8, E))

    def losses(logits, axis_name):
        routes = route(RouterConfig(), logits, K)
        loss = balance_loss(
            routes.scores, routes.topk_ids, per_sequence=per_sequence, axis_name=axis_name
        )
        loss += z_loss(logits, routes.topk_ids, axis_name=axis_name)
        return loss, expert_load(routes.topk_ids, E, axis_name)

    def mapped(logits):
        on_shard = functools.partial(losses, axis_name=axes)
        return jax.shard_map(on_shard, mesh=mesh, in_specs=P(axes), out_specs=P())(logits)

    one_device = functools.partial(losses, axis_name=())
    (got, load), got_grad = jax.jit(jax.value_and_grad(mapped, has_aux=True))(logits)
    (loss, _), grad = jax.value_and_grad(one_device, has_aux=True)(logits)
    np.testing.assert_allclose(got, loss, rtol=1e-6)
    np.testing.assert_allclose(got_grad, grad, rtol=1e-5, atol=1e-9)
    ids = route(RouterConfig(), logits, K).topk_ids
    np.testing.assert_array_equal(load, np.bincount(ids.ravel(), minlength=E))


def test_the_bias_moves_by_the_sign_of_the_error_of_each_layer():
    load = np.array([[9, 3, 6, 6], [0, 0, 0, 8]])
    bias = np.zeros((2, 4), np.float32)
    wanted = [[-0.1, 0.1, 0, 0], [0.1, 0.1, 0.1, -0.1]]
    np.testing.assert_allclose(update_bias(bias, load, 0.1), wanted, rtol=1e-6)


@pytest.mark.thorough
def test_updates_of_the_bias_balance_a_skewed_router():
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((512, E)) + np.linspace(0, 2, E)).astype(np.float32)
    config = RouterConfig(scores="sigmoid")

    def worst(bias):
        load = np.asarray(expert_load(route(config, logits, K, bias).topk_ids, E))
        return load, load.max() / load.mean()

    bias = jnp.zeros(E)
    load, before = worst(bias)
    for _ in range(200):
        bias = update_bias(bias, load, 0.01)
        load, after = worst(bias)
    assert before > 2 and after < 1.2


@pytest.mark.parametrize(
    "options, message",
    [
        ({"scores": "relu"}, "scores must be one of"),
        ({"group_scores": "mean"}, "group_scores must be one of"),
        ({"topk_expert_groups": 2}, "from 1 to n_expert_groups; got topk_expert_groups=2"),
        ({"topk_expert_groups": 0}, "topk_expert_groups must be positive; got 0"),
        ({"n_expert_groups": "4"}, "n_expert_groups must be a positive integer; got '4'"),
        ({"normalize": 1}, "normalize must be True or False; got 1"),
        ({"scaling": "2.5"}, "scaling must be a finite number, .*; got '2.5'"),
        ({"scaling": np.nan}, "scaling must be a finite number, .*; got nan"),
    ],
)
def test_a_config_checks_its_values(options, message):
    with pytest.raises(ValueError, match=message):
        RouterConfig(**options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"n_expert_groups": 3}, "n_experts=16, n_expert_groups=3"),
        ({"n_expert_groups": 16, "group_scores": "top2"}, "at least 2 experts; got 16 experts"),
        ({"n_expert_groups": 8}, "top_k must be at most .* 2; got top_k=4"),
    ],
)
def test_route_checks_that_the_groups_fit(options, message):
    with pytest.raises(ValueError, match=message):
        route(RouterConfig(**options), np.zeros((T, E), np.float32), K)


LOGITS, IDS = np.zeros((T, E), np.float32), np.zeros((T, K), np.int32)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: route(RouterConfig(), LOGITS[0, 0], K), r"logits must have the shape \[E\]; got"),
        (lambda: route(RouterConfig(), LOGITS.astype(int), K), "logits must be floating-point"),
        (
            lambda: route(RouterConfig(), LOGITS, K, LOGITS[0, :8]),
            r"bias must .* \[E=16\]; got \(8",
        ),
        (lambda: expert_load(LOGITS, E), "topk_ids must be integers; got float32"),
        (lambda: balance_loss(LOGITS, IDS[:8]), r"topk_ids must .* \[40, K\]; got \(8, 4\)"),
        (lambda: balance_loss(IDS, LOGITS), "scores must be floating-point numbers; got int32"),
        (lambda: balance_loss(LOGITS[0], IDS[0], per_sequence=True), r"scores must .* \[S, E\]"),
        (lambda: z_loss(LOGITS[None], IDS), r"topk_ids must .* \[1, 40, K\]; got \(40, 4\)"),
        (lambda: z_loss(LOGITS.astype(int)), "logits must be floating-point numbers"),
        (lambda: update_bias(LOGITS[0], LOGITS), r"load must .* \[E=16\]; got \(40, 16\)"),
        (lambda: update_bias(LOGITS[:2], LOGITS[0]), r"load must .* \[layers=2, E=16\]; got \(16"),
        (lambda: update_bias(LOGITS[0], None), "load must be an array; got None"),
    ],
)
def test_shapes_and_dtypes_are_checked(call, message):
    with pytest.raises(ValueError, match=rf"^\w+: {message}"):
        call()


def test_route_takes_a_config_and_a_count():
    with pytest.raises(TypeError, match="route: config must be a RouterConfig; got None"):
        route(None, LOGITS, K)
    with pytest.raises(ValueError, match="top_k must be a positive integer; got 2.0"):
        route(RouterConfig(), LOGITS, 2.0)


@pytest.mark.xla_collectives
@pytest.mark.usefixtures("one_process")
def test_a_loss_per_sequence_adds_up_sequences_over_their_shards():
    """Sequences of 4 tokens, on 2 shards each; some shards, and a sequence, are all padding."""
    mesh = make_mesh(2, 2)
    rng = np.random.default_rng(6)
    scores = jax.nn.softmax(jnp.asarray(rng.normal(size=(4, 4, E)), jnp.float32))
    _, ids = jax.lax.top_k(scores, 2)
    ids = jnp.where(jnp.arange(4)[:, None] < jnp.array([4, 2, 0, 3])[:, None, None], ids, -1)

    def loss(scores, ids, axis_name=(), sequence_axis_name=()):
        options = {"axis_name": axis_name, "sequence_axis_name": sequence_axis_name}
        return balance_loss(scores, ids, per_sequence=True, **options)

    sharded = jax.shard_map(
        functools.partial(loss, axis_name=("dp", "ep"), sequence_axis_name="ep"),
        mesh=mesh,
        in_specs=P("dp", "ep"),
        out_specs=P(),
    )
    got, grads = jax.jit(jax.value_and_grad(sharded))(scores, ids)
    wanted, of_one = jax.value_and_grad(loss)(scores, ids)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    np.testing.assert_allclose(grads, of_one, rtol=1e-5, atol=1e-7)
