"""The router where float32 rounds scores alike or underflows, and where inputs are padding.

Exact values are decimals of 200 digits, float64 or Python's integers.
"""

import decimal
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from harness import make_mesh
from jax_ep.router import RouterConfig, balance_loss, expert_load, route, update_bias, z_loss

T, E, K = 12, 16, 4
RANGES = {
    "saturated": (15, 45),
    "small": (-80, -40),
    "underflow": (-180, -105),
    "mixed": (-180, 180),
}


def logits_of(name, shape=(T, E)):
    return np.random.default_rng(0).uniform(*RANGES[name], shape).astype(np.float32)


def jit_route(config, logits, top_k, *bias):
    return jax.jit(functools.partial(route, config), static_argnums=1)(logits, top_k, *bias)


def exact_scores(kind, logits):
    with decimal.localcontext(prec=200):
        exp = [decimal.Decimal(float(x)).exp() for x in logits]
        return [x / sum(exp) if kind == "softmax" else x / (1 + x) for x in exp]


def choose_exactly(config, logits):
    """The K experts of a token; of equal scores, the lower id first."""
    with decimal.localcontext(prec=200):
        scores = exact_scores(config.scores, logits)
        groups = np.split(np.arange(E), config.n_expert_groups)
        n_best = 2 if config.group_scores == "top2" else 1
        of_group = lambda group: sum(sorted(scores[i] for i in group)[-n_best:])  # noqa: E731
        best = sorted(groups, key=of_group, reverse=True)[: config.topk_expert_groups]
        candidates = sorted(np.concatenate(best))
        return sorted(candidates, key=lambda i: scores[i], reverse=True)[:K]


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    "groups",
    [
        {},
        {"n_expert_groups": 4, "topk_expert_groups": 2},
        {"n_expert_groups": 4, "topk_expert_groups": 2, "group_scores": "top2"},
    ],
)
def test_without_a_bias_choices_are_exact(groups, kind):
    config = RouterConfig(scores=kind, **groups)
    equal = np.random.default_rng(0).choice(np.float32([-3, -0.0, 0, 2]), (T, E))
    logits = np.concatenate([*map(logits_of, RANGES), equal])
    ids = jit_route(config, logits, K).topk_ids
    np.testing.assert_array_equal(ids, [choose_exactly(config, row) for row in logits])


def test_experts_with_a_logit_of_minus_infinity_are_chosen_last_but_before_other_groups():
    logits = np.full((1, E), -np.inf, np.float32)
    logits[0, [5, 6]] = 2, 3
    routes = jit_route(RouterConfig(n_expert_groups=4, topk_expert_groups=1), logits, K)
    np.testing.assert_array_equal(routes.topk_ids, [[6, 5, 4, 7]])
    weights = np.exp([[3, 2, -np.inf, -np.inf]])
    np.testing.assert_allclose(routes.topk_weights, weights / weights.sum(), rtol=1e-6)


def log_scores(kind, logits):
    return logits if kind == "softmax" else -np.logaddexp(0, -logits)


WEIGHED = [
    *(logits_of(name, (3, K)) for name in RANGES),
    [[-1e4, -1e4 - 1, -1e4 + 2, -1e30], [1e4, 1e4 + 1, 1e4 - 2, 1e30], [-1e4] * K, [1e4] * K],
    [[-50, -np.inf, -51, -np.inf], [-np.inf, 1, 2, 3]],
    np.linspace(-24, -18, 96).reshape(-1, K),  # around the sum from which scores are divided
]


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_normalized_weights_and_their_gradients_are_those_of_float64(kind):
    """Also where a bias chooses experts whose scores underflow."""
    chosen = np.concatenate(WEIGHED).astype(np.float32)
    # One more expert, which gets nearly the whole softmax, and which the bias leaves out.
    largest = np.minimum(chosen.max(axis=-1, keepdims=True) + 200, 3e38)
    logits, bias = np.append(chosen, largest, axis=-1), np.float32([40, 30, 20, 10, -10])
    cotangent = np.linspace(-1, 2, K)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def weigh(logits):
        routes = route(RouterConfig(scores=kind), logits, K, bias)
        return jnp.sum(routes.topk_weights * jnp.float32(cotangent)), routes

    (_, routes), grad = weigh(logits)
    np.testing.assert_array_equal(routes.topk_ids, np.tile(np.arange(K), (len(logits), 1)))
    chosen = chosen.astype(np.float64)
    logs = log_scores(kind, chosen)
    exact = np.exp(logs - logs.max(axis=-1, keepdims=True))
    exact /= exact.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(routes.topk_weights, exact, rtol=3e-5, atol=1e-35)

    exact_grad = exact * (cotangent - (exact * cotangent).sum(axis=-1, keepdims=True))
    if kind == "sigmoid":
        exact_grad *= np.exp(log_scores(kind, -chosen))
    np.testing.assert_allclose(grad[:, :K], exact_grad, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(grad[:, K:], 0)


def test_weights_of_a_token_without_experts_are_zero_and_have_no_gradient():
    logits = np.full((2, E), -np.inf, np.float32)
    config = RouterConfig(scores="sigmoid")
    weigh = lambda x: route(config, x, K).topk_weights[:, 0].sum()  # noqa: E731
    value, grad = jax.jit(jax.value_and_grad(weigh))(logits)
    assert value == 0 and not np.any(grad)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_logits_of_16_bits_are_computed_in_float32(dtype):
    logits = jnp.asarray(logits_of("saturated"), dtype)
    config = RouterConfig(scores="sigmoid")
    got, wanted = (jit_route(config, x, K) for x in (logits, logits.astype(jnp.float32)))
    jax.tree.map(np.testing.assert_array_equal, tuple(got), tuple(wanted))
    loss = jax.jit(balance_loss)
    assert loss(got.scores.astype(dtype), got.topk_ids) == loss(wanted.scores, wanted.topk_ids)


def test_balance_loss_of_small_scores_matches_float64():
    rng = np.random.default_rng(1)
    means = np.repeat([0, -20, -50, -80], 6)[:, None]
    logits = (means + rng.standard_normal((24, E))).astype(np.float32)
    ids = np.argsort(-logits, axis=-1)[:, :K].astype(np.int32)

    def loss(logits):
        return balance_loss(jax.nn.sigmoid(logits), ids)

    value, grad = jax.jit(jax.value_and_grad(loss))(logits)
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    shares = scores / scores.sum(axis=-1, keepdims=True)
    load = np.bincount(ids.ravel(), minlength=E) / ids.size
    np.testing.assert_allclose(value, E * (load * shares.mean(axis=0)).sum(), rtol=1e-5)
    of_scores = shares * (1 - scores) * (load - (load * shares).sum(axis=-1, keepdims=True))
    np.testing.assert_allclose(grad, E * of_scores / 24, rtol=1e-3, atol=1e-7)


def test_balance_loss_of_scores_that_are_zero_is_zero():
    ids = np.zeros((2, K), np.int32)
    value, grad = jax.jit(jax.value_and_grad(balance_loss))(jnp.zeros((2, E)), ids)
    assert value == 0 and np.isfinite(grad).all()


def test_balance_loss_takes_memory_for_scores_not_for_choices_of_each_expert():
    n_tokens, n_experts = 4096, 256
    scores = jax.ShapeDtypeStruct((n_tokens, n_experts), jnp.float32)
    ids = jax.ShapeDtypeStruct((n_tokens, 8), jnp.int32)
    compiled = jax.jit(jax.value_and_grad(balance_loss)).lower(scores, ids).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * 4 * scores.size


def batch(rng=None):
    """Scores and logits of 6 sequences of 5 tokens, and ids, of which three are padding as a whole;
    with `rng`, numbers in place of NaN and infinity in the padding.
    """
    values = np.random.default_rng(3).standard_normal((6, 5, E))
    scores = np.exp(values) / np.exp(values).sum(axis=-1, keepdims=True)
    ids = np.argsort(-scores, axis=-1)[..., :K]
    ids[np.arange(5) >= np.array([5, 0, 2, 0, 0, 4])[:, None]] = -1
    anything = np.resize([np.nan, np.inf, -np.inf], values.shape)
    anything = anything if rng is None else rng.standard_normal(values.shape)
    is_token = ids[..., :1] >= 0
    arrays = (np.where(is_token, x, anything).astype(np.float32) for x in (scores, values))
    return *arrays, ids.astype(np.int32)


LOSSES = {
    "balance": lambda scores, _, ids, **axes: balance_loss(scores, ids, **axes),
    "sequences": lambda scores, _, ids, **axes: balance_loss(
        scores, ids, per_sequence=True, **axes
    ),
    "z": lambda _, logits, ids, **axes: z_loss(logits, ids, **axes),
}


def exact_loss(name):
    """In float64, of the tokens alone."""
    scores, logits, ids = batch()
    is_token = ids[..., 0] >= 0
    if name == "z":
        return np.mean(np.log(np.exp(logits[is_token].astype(np.float64)).sum(axis=-1)) ** 2)

    def loss(scores, ids):
        load = np.bincount(ids.ravel(), minlength=E) / ids.size
        return E * (load * scores.astype(np.float64).mean(axis=0)).sum()

    if name == "balance":
        return loss(scores[is_token], ids[is_token])
    real = [(s[m], i[m]) for s, i, m in zip(scores, ids, is_token, strict=True) if m.any()]
    return np.mean([loss(*each) for each in real])


@pytest.mark.parametrize("name", LOSSES)
def test_losses_do_not_depend_on_padding(name):
    loss = jax.jit(jax.value_and_grad(LOSSES[name], argnums=(0, 1)))
    value, grads = loss(*batch())
    np.testing.assert_allclose(value, exact_loss(name), rtol=1e-5)
    with_numbers = loss(*batch(np.random.default_rng(0)))
    jax.tree.map(np.testing.assert_array_equal, (value, grads), with_numbers)
    is_padding = batch()[2][..., 0] < 0
    assert not any(np.any(grad[is_padding]) for grad in grads)
    scores, logits, ids = batch()
    value, grads = loss(scores, logits, np.full_like(ids, -1))
    assert value == 0 and not any(map(np.any, grads))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.usefixtures("one_process")
def test_losses_of_shards_do_not_depend_on_padding(name):
    """Two of three shards have the same number of sequences with tokens, the other has none."""
    mesh = make_mesh(3)
    order = np.array([0, 2, 5, 1, 3, 4])  # the last shard is all padding
    arrays = [x[order] for x in batch()]
    spec = P("ep")
    loss = functools.partial(LOSSES[name], axis_name="ep")
    sharded = jax.shard_map(loss, mesh=mesh, in_specs=(spec,) * 3, out_specs=P())
    value, grads = jax.jit(jax.value_and_grad(sharded, argnums=(0, 1)))(*arrays)
    np.testing.assert_allclose(value, exact_loss(name), rtol=1e-5)
    _, wanted = jax.jit(jax.value_and_grad(LOSSES[name], argnums=(0, 1)))(*arrays)
    for got, of_one in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(got, of_one, rtol=1e-5, atol=1e-8)


def test_losses_can_be_mapped_by_vmap():
    scores, _, ids = batch()
    loss = jax.jit(balance_loss)
    wanted = [loss(*each) for each in zip(scores, ids, strict=True)]
    np.testing.assert_allclose(jax.jit(jax.vmap(balance_loss))(scores, ids), wanted, rtol=1e-6)
    config = RouterConfig(scores="sigmoid", n_expert_groups=4, topk_expert_groups=2)
    logits = logits_of("mixed", (2, T, E))
    mapped = jax.jit(jax.vmap(lambda x: route(config, x, K)))(logits)
    jax.tree.map(np.testing.assert_array_equal, mapped, jit_route(config, logits, K))


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64])
def test_integer_loads_are_compared_exactly(dtype):
    rng, largest = np.random.default_rng(0), int(np.iinfo(np.int32).max)
    if np.dtype(dtype).itemsize == 8:
        largest <<= 20
    load = np.stack(
        [
            np.full(12, 7654321),
            np.full(12, largest),
            largest - np.arange(12) // 6,
            largest - np.arange(12) // 11,
            *rng.integers(largest - 2, largest + 1, (8, 12)),
            *rng.integers(0, largest, (8, 12)),
            np.eye(12, dtype=np.int64)[3] * largest,
            np.zeros(12, np.int64),
        ]
    ).astype(dtype)
    wanted = [[np.sign(sum(row) - 12 * x) for x in row] for row in load.astype(object)]
    got = update_bias(np.zeros(load.shape, np.float32), load, 1.0)
    np.testing.assert_array_equal(got, np.float32(wanted))


def test_loads_of_many_experts_are_compared_exactly():
    load = np.full(2**16, 2**31 - 1, np.int32)
    load[0] -= 1
    got = np.asarray(jax.jit(update_bias)(jnp.zeros(load.shape), load, 1.0))
    assert got[0] == 1 and (got[1:] == -1).all()


def test_loads_of_other_dtypes():
    for dtype in (np.int8, np.uint16, np.float32, jnp.bfloat16):
        got = update_bias(np.zeros(3, np.float32), np.array([1, 2, 6], dtype), 1.0)
        np.testing.assert_array_equal(got, [1, 1, -1])


def test_differences_of_large_floats_are_kept():
    top = 2.0**24
    for load in (np.float32([top, top - 1, top - 1, top - 2]), 2.0**25 + np.array([1, 0, 0, -1.0])):
        np.testing.assert_array_equal(update_bias(np.zeros(4), load, 1.0), [-1, 0, 0, 1])
    huge = np.float32([3e38, 3e38, 3e38, 1])
    np.testing.assert_array_equal(update_bias(np.zeros(4), huge, 1.0), [-1, -1, -1, 1])


def test_the_load_leaves_out_ids_that_are_no_expert():
    ids = np.array([[-1, 0], [E, 2**30], [-(2**31), 0]])
    np.testing.assert_array_equal(expert_load(ids.astype(np.int32), E), [2] + [0] * (E - 1))
