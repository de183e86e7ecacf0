"""jax_ep.integrations.transformer_engine: a layer written against Transformer Engine's names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep.integrations import transformer_engine as te

pytestmark = pytest.mark.usefixtures("one_process", "float32_matmuls")
R, E, K, H, B, S = 4, 8, 2, 16, 8, 4
M = B * S // 4  # tokens of a rank; all tokens are on 4 ranks, or on 2 x 2
AXES = "dp", "ep"


def mesh_of(n_dp, n_ep):
    devices = jax.devices()
    if len(devices) < n_dp * n_ep:
        pytest.skip(f"needs {n_dp * n_ep} devices, found {len(devices)}")
    grid = np.array(devices[: n_dp * n_ep]).reshape(n_dp, n_ep)
    return jax.sharding.Mesh(grid, AXES)


def bootstrap(mesh, capacity, **options):
    sizes = dict(num_experts=E, max_tokens_per_rank=M, hidden_dim=H)
    te.ep_bootstrap(
        mesh.size,
        None,
        **sizes,
        recv_capacity_per_rank=capacity,
        max_token_dtype=jnp.float32,
        ep_resource="ep",
        dp_resource="dp",
        mesh=mesh,
        **options,
    )


def layer(cfg, capacity, x, ids, weights, matrices):
    """Experts multiply by a matrix; the caller weights their results, as in Transformer Engine."""
    received, row_weights, handle, counts, total = te.ep_dispatch(cfg, ids, x, weights, capacity)
    # The experts of a shard are those of its index along "ep".
    by_shard = jnp.tile(
        matrices.reshape(-1, counts.shape[1], H, H), (len(counts) * counts.shape[1] // E, 1, 1, 1)
    )
    results = jax.vmap(jax.lax.ragged_dot)(received, by_shard, counts)
    weighted = results * row_weights[..., None]
    output = te.ep_combine(cfg, handle, counts, weighted, (B, S), out_sharding=(AXES,))
    return jnp.sum(output**2), (output, total)


def dense_layer(x, ids, weights, matrices):
    results = jnp.einsum("bsh,ehg->bseg", x, matrices)
    chosen = jnp.take_along_axis(results, ids[..., None], axis=2)
    output = jnp.sum(chosen * weights[..., None], axis=2)
    return jnp.sum(output**2), output


def operands():
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (B, S, H))
    weights, ids = jax.lax.top_k(jax.random.normal(keys[1], (B, S, E)), K)
    return x, ids, jax.nn.softmax(weights), jax.random.normal(keys[2], (E, H, H)) / 4


@pytest.mark.parametrize("shape", [(1, 4), (2, 2)], ids=str)
@pytest.mark.parametrize("alignment", [0, 16])
def test_a_layer_equals_a_dense_one(shape, alignment):
    """Also its gradients; with more capacity than the worst case."""
    capacity = 512
    bootstrap(mesh_of(*shape), capacity)
    cfg = te.EpLayerConfig(K, alignment)
    arrays = operands()
    gradient = jax.jit(jax.grad(layer, (2, 4, 5), has_aux=True), static_argnums=(0, 1))
    (dx, dw, dm), (output, total) = gradient(cfg, capacity, *arrays)
    wanted, dense_output = jax.grad(dense_layer, (0, 2, 3), has_aux=True)(*arrays)
    for one, other in zip((dx, dw, dm, output), (*wanted, dense_output), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())
    assert total.shape == (4, 1) and (total.sum() == B * S * K) == (alignment == 0)


@pytest.mark.thorough
def test_prepare_counts_as_dispatch_does():
    bootstrap(mesh_of(1, R), 512)
    cfg = te.EpLayerConfig(K, 16)
    x, ids, weights, _ = operands()
    counts, total, _ = te.ep_prepare(cfg, ids)
    *_, dispatch_counts, dispatch_total = te.ep_dispatch(cfg, ids, x, weights, 512)
    np.testing.assert_array_equal(counts, dispatch_counts)
    np.testing.assert_array_equal(total, dispatch_total)
    assert counts.shape == (R, E // R) and (counts % 16 == 0).all()


@pytest.mark.thorough
def test_prepared_routing_combines():
    """Rows of ones, unweighted: each token is the number of its choices."""
    bootstrap(mesh_of(1, R), 512)
    cfg = te.EpLayerConfig(K)
    counts, _, handle = te.ep_prepare(cfg, operands()[1])
    output = te.ep_combine(cfg, handle, counts, jnp.ones((R, 512, H)), B * S)
    np.testing.assert_array_equal(output, np.full((B * S, H), K))


@pytest.mark.thorough
def test_overflow_drops_and_counts():
    bootstrap(mesh_of(1, R), 8, drop_on_overflow=True)
    x, _, weights, matrices = operands()
    ids = jnp.zeros((B, S, K), jnp.int32).at[..., 1].set(1)  # both on rank 0
    _, (output, total) = layer(te.EpLayerConfig(K), 8, x, ids, weights, matrices)
    assert total.ravel().tolist() == [B * S * K, 0, 0, 0]
    assert (np.abs(output).sum(axis=-1) > 0).sum() == 8


@pytest.mark.thorough
def test_unused_slots_hold_zeros():
    bootstrap(mesh_of(1, R), 512)
    x, ids, weights, _ = operands()
    received, row_weights, *_ = te.ep_dispatch(te.EpLayerConfig(K), ids, x, weights, 512)
    assert received.shape == (R, 512, H) and row_weights.shape == (R, 512)
    is_used = np.asarray(row_weights) != 0
    assert is_used.sum() == B * S * K and not np.asarray(received)[~is_used].any()
    assert received.sharding.spec[0] == AXES
