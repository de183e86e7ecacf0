"""The model: Qwen3-MoE's decoder as a Flax NNX module.

Grouped-query attention with normalized queries and keys and rotary positions, then experts. The
parameters are float32; matmuls are in `dtype`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from experts import INIT, CreateMoE
from layout import ALL, gather
from loss import cross_entropy
from sizes import Sizes

norm = functools.partial(nnx.RMSNorm, epsilon=1e-6)


class Routing(NamedTuple):
    """The reports of the MoE layers, [L, ...] once they are stacked."""

    balance_loss: jax.Array  # float32[]; 1 if all experts get the same share
    z_loss: jax.Array  # float32[]
    expert_load: jax.Array  # int32[E], choices over all tokens
    n_dropped: jax.Array  # int32[], rows that did not fit, over all devices


class Matrix(nnx.Module):
    """Stored in shards over all devices along one dimension; whole on each of them in calls."""

    def __init__(
        self,
        mesh: Mesh,
        shape: tuple[int, int],
        sharded_dim: int,
        rngs: nnx.Rngs,
        init: nnx.Initializer = INIT,
    ):
        self.mesh = mesh
        spec = [None, None]
        spec[sharded_dim] = ALL
        create = nnx.with_partitioning(init, tuple(spec), mesh=mesh)
        self.kernel = nnx.Param(create(rngs.params(), shape))

    def __call__(self, dtype: Any) -> jax.Array:
        return gather(self.mesh, self.kernel[...].astype(dtype))


class Attention(nnx.Module):
    """Causal self-attention."""

    def __init__(self, sizes: Sizes, mesh: Mesh, dtype: Any, rngs: nnx.Rngs):
        self.sizes, self.dtype = sizes, dtype
        size, n_heads = sizes.hidden_size, sizes.n_heads + 2 * sizes.n_kv_heads
        self.qkv = Matrix(mesh, (size, n_heads * sizes.head_size), 0, rngs)
        self.out = Matrix(mesh, (sizes.attention_size, size), 1, rngs)
        self.q_norm = norm(sizes.head_size, dtype=dtype, rngs=rngs)
        self.k_norm = norm(sizes.head_size, dtype=dtype, rngs=rngs)
        on_gpu = mesh.devices.flat[0].platform == "gpu"
        self.implementation = "cudnn" if on_gpu and dtype != jnp.float32 else "xla"

    def __call__(self, x: jax.Array, angles: jax.Array) -> jax.Array:  # [B, S, H]
        sizes = self.sizes
        heads = (x @ self.qkv(self.dtype)).reshape(*x.shape[:2], -1, sizes.head_size)
        at = sizes.n_heads, sizes.n_heads + sizes.n_kv_heads
        q, k, v = jnp.split(heads, at, axis=2)
        q, k = rotate(self.q_norm(q), angles), rotate(self.k_norm(k), angles)
        attended = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation=self.implementation
        )
        return attended.reshape(*x.shape[:2], -1) @ self.out(self.dtype)


def rotary_angles(length: int, head_size: int, theta: float) -> jax.Array:
    """Returns float32[S, head_size / 2]."""
    frequencies = theta ** (-jnp.arange(0, head_size, 2) / head_size)
    return jnp.arange(length)[:, None] * frequencies


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:  # [B, S, heads, head_size]
    """Turns each pair (x_i, x_{i + head_size / 2}) by its angle."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


class Block(nnx.Module):
    """Attention, then experts: each reads a normalized input and adds its output to the input."""

    def __init__(self, sizes: Sizes, mesh: Mesh, dtype: Any, create_moe: CreateMoE, rngs: nnx.Rngs):
        self.attention_norm = norm(sizes.hidden_size, dtype=dtype, rngs=rngs)
        self.attention = Attention(sizes, mesh, dtype, rngs)
        self.moe_norm = norm(sizes.hidden_size, dtype=dtype, rngs=rngs)
        self.moe = create_moe(rngs)

    def __call__(self, x: jax.Array, angles: jax.Array) -> tuple[jax.Array, Routing]:
        x = x + self.attention(self.attention_norm(x), angles)
        output, report = self.moe(self.moe_norm(x))
        kept = [getattr(report, name) for name in Routing._fields]
        return x + output, Routing(*kept)


class Transformer(nnx.Module):
    """Maps windows of tokens to the loss of each next token."""

    def __init__(
        self,
        sizes: Sizes,
        mesh: Mesh,
        create_moe: CreateMoE,
        rngs: nnx.Rngs,
        *,
        dtype: Any,
        remat: bool,
        loss_chunks: int,
    ):
        self.sizes, self.dtype, self.remat, self.loss_chunks = sizes, dtype, remat, loss_chunks
        # Large, so that tokens differ, and with them their experts, from the first step on.
        init, shape = nnx.initializers.normal(1.0), (sizes.vocabulary, sizes.hidden_size)
        self.embedding = Matrix(mesh, shape, 1, rngs, init)
        blocks = [Block(sizes, mesh, dtype, create_moe, rngs) for _ in range(sizes.n_layers)]
        self.blocks = nnx.List(blocks)
        self.norm = norm(sizes.hidden_size, dtype=dtype, rngs=rngs)
        self.head = Matrix(mesh, (sizes.hidden_size, sizes.vocabulary), 0, rngs)

    def __call__(self, windows: jax.Array) -> tuple[jax.Array, Routing]:  # int32[B, S + 1]
        tokens, targets = windows[:, :-1], windows[:, 1:]
        # In float32, so that the gradient of a frequent token is a sum in float32.
        x = self.embedding(jnp.float32)[tokens].astype(self.dtype)
        angles = rotary_angles(tokens.shape[1], self.sizes.head_size, self.sizes.rope_theta)
        run = nnx.remat(Block.__call__) if self.remat else Block.__call__
        routings = []
        for block in self.blocks:
            x, routing = run(block, x, angles)
            routings.append(routing)
        by_layer = jax.tree.map(lambda *layers: jnp.stack(layers), *routings)
        loss = cross_entropy(self.norm(x), self.head(self.dtype), targets, self.loss_chunks)
        return loss, by_layer
