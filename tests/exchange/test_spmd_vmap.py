"""`vmap` with `spmd_axis_name` around a `shard_map`, whose values then vary over one more axis.

JAX checks the types of values under `check_vma`, those of gradients of integers included.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

import jax_ep
from harness import AXIS, make_mesh

pytestmark = pytest.mark.usefixtures("one_process")
DP, R, E, K, T, F = 2, 2, 4, 2, 4, 32
FORMATS = {
    "float32": (jax_ep.Plain(jnp.float32), 32),
    "mxfp8": (jax_ep.MXFP8(), 32),
    "blockwise_fp8": (jax_ep.BlockwiseFP8(), 128),
}


def open_group(name, transport) -> jax_ep.EPGroup:
    token_format, hidden_size = FORMATS[name]
    config = jax_ep.EPConfig(
        n_experts=E,
        top_k=K,
        hidden_size=hidden_size,
        max_tokens_per_rank=T,
        token_format=token_format,
        combine_dtype=jnp.float32,
    )
    return jax_ep.ep_init(make_mesh(R, dp=DP), AXIS, config, transport)


def make_arrays(group):
    """Tokens, weights, ids and experts' matrices, each with an axis for "dp"."""
    rng, size = np.random.default_rng(0), group.config.hidden_size
    shapes = [(DP, R * T, size), (DP, R * T, K), (DP, E, size, 2 * F), (DP, E, F, size)]
    tokens, weights, *matrices = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    ids = rng.integers(E, size=(DP, R * T, K), dtype=np.int32)
    return tokens, weights, *matrices, ids


def moe(group, at_dispatch, tokens, weights, gate_up, down, ids):
    rows = jax_ep.dispatch(group, tokens, ids, weights if at_dispatch else None)
    results = jax_ep.expert_mlp(rows, gate_up, down).astype(jnp.float32)
    return jax_ep.combine(group, results, rows, None if at_dispatch else weights)


def only_dispatch(group, at_dispatch, tokens, weights, gate_up, down, ids):
    rows = jax_ep.dispatch(group, tokens, ids, weights if at_dispatch else None)
    used = (jnp.arange(group.max_recv_tokens) < rows.row_offsets[-1].astype(jnp.int32))[:, None]
    squares = jnp.where(used, rows.tokens, 0) ** 2
    if at_dispatch:
        squares *= jnp.where(used, rows.row_weights[:, None], 0)
    return squares


def gradients(layer, group, mapped, jits, **options):
    """A function for all gradients but the ids', with "dp" mapped by `vmap` or by `shard_map`."""
    spec = P(AXIS) if mapped else P("dp", AXIS)
    body = layer
    if not mapped:
        body = lambda *args: layer(*(x[0] for x in args))[None]  # noqa: E731
    sharded = jax.shard_map(body, mesh=group.mesh, in_specs=spec, out_specs=spec, **options)
    if mapped:
        sharded = jax.vmap(sharded, spmd_axis_name="dp")
    function = jax.jit(sharded) if jits else sharded

    def loss(*arrays):
        return jnp.sum(function(*arrays) ** 2)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))


def check(layer, group, jits=False, **options) -> None:
    got, wanted = (
        gradients(layer, group, mapped, jits, **options)(*make_arrays(group))
        for mapped in (True, False)
    )
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize("jits", [False, True])
@pytest.mark.parametrize("at_dispatch", [True, False], ids=["row weights", "source weights"])
@pytest.mark.parametrize("name", FORMATS)
def test_gradients_of_a_layer_can_be_traced(name, at_dispatch, jits):
    group = open_group(name, "host")
    function = gradients(functools.partial(moe, group, at_dispatch), group, True, jits)
    jax.eval_shape(function, *make_arrays(group))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["float32", "mxfp8"])
def test_gradients_of_a_layer_equal_those_without_vmap(name):
    group = open_group(name, "host")
    check(functools.partial(moe, group, True), group, jits=True)


@pytest.mark.parametrize("at_dispatch", [True, False], ids=["row weights", "no weights"])
def test_gradients_of_dispatch_equal_those_without_vmap(at_dispatch, transport):
    group = open_group("float32", transport)
    check(functools.partial(only_dispatch, group, at_dispatch), group)


def test_without_check_vma_all_transports_have_gradients(transport):
    group = open_group("float32", transport)
    function = gradients(functools.partial(moe, group, True), group, True, True, check_vma=False)
    jax.eval_shape(function, *make_arrays(group))
