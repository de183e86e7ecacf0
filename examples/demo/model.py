"""The model: a small byte-level transformer whose feed-forward layers are MoE.

The model does not mention devices. `run_experts`, one of the two functions in `experts.py`, takes
tokens to their experts and back.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes. In shapes, H is `hidden_size`, F `expert_size`, E `n_experts`, K `top_k`."""

    vocabulary: int = 256
    context: int = 64
    hidden_size: int = 96
    n_layers: int = 2
    n_heads: int = 4
    n_experts: int = 16
    top_k: int = 4
    expert_size: int = 64


class Routing(NamedTuple):
    """The reports of one MoE layer besides its output."""

    topk_ids: jax.Array  # int32[N, K]
    balance_loss: jax.Array  # float32[]; 1 if all experts get the same share
    n_dropped: jax.Array  # int32[]; rows that did not fit, over all ranks


# (gate_up [E, H, 2 F], down [E, F, H], tokens [N, H], topk_ids [N, K], topk_weights [N, K])
# -> (output [N, H], n_dropped [])
RunExperts = Callable[..., tuple[jax.Array, jax.Array]]


class Experts(nnx.Module):
    """The weights of a layer's experts; axis 0 is the expert."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        n_experts, size, width = config.n_experts, config.hidden_size, config.expert_size
        init = nnx.initializers.lecun_normal(in_axis=1, out_axis=2, batch_axis=0)
        self.gate_up = nnx.Param(init(rngs.params(), (n_experts, size, 2 * width)))
        self.down = nnx.Param(init(rngs.params(), (n_experts, width, size)))


class MoE(nnx.Module):
    """Router, then the chosen experts, weighted by the router's probabilities."""

    def __init__(self, config: ModelConfig, run_experts: RunExperts, rngs: nnx.Rngs):
        self.top_k = config.top_k
        self.run_experts = run_experts
        self.router = linear(config.hidden_size, config.n_experts, rngs)
        self.experts = Experts(config, rngs)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, Routing]:  # [N, H]
        probabilities = jax.nn.softmax(self.router(tokens))  # [N, E]
        weights, topk_ids = jax.lax.top_k(probabilities, self.top_k)  # [N, K]
        weights /= weights.sum(axis=-1, keepdims=True)
        gate_up, down = self.experts.gate_up[...], self.experts.down[...]
        output, n_dropped = self.run_experts(gate_up, down, tokens, topk_ids, weights)
        loss = balance_loss(probabilities, topk_ids)
        return output, Routing(topk_ids, loss, n_dropped)


def balance_loss(probabilities: jax.Array, topk_ids: jax.Array) -> jax.Array:
    """E · Σ over experts of (fraction of the choices) · (mean probability).

    Idea: Switch Transformer, https://arxiv.org/abs/2101.03961, section 2.2.
    """
    n_experts = probabilities.shape[-1]
    fraction = jnp.mean(jax.nn.one_hot(topk_ids, n_experts), axis=(0, 1))
    return n_experts * jnp.sum(fraction * probabilities.mean(axis=0))


class Attention(nnx.Module):
    """Causal self-attention."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.n_heads = config.n_heads
        self.qkv = linear(config.hidden_size, 3 * config.hidden_size, rngs)
        self.out = linear(config.hidden_size, config.hidden_size, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, S, H]
        batch, length, size = x.shape
        heads = self.qkv(x).reshape(batch, length, 3 * self.n_heads, -1)
        q, k, v = jnp.split(heads, 3, axis=2)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.reshape(batch, length, size))


class Block(nnx.Module):
    """Attention, then experts: each reads a normalized input and adds its output to the input."""

    def __init__(self, config: ModelConfig, run_experts: RunExperts, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(config.hidden_size, rngs=rngs)
        self.attention = Attention(config, rngs)
        self.moe_norm = nnx.RMSNorm(config.hidden_size, rngs=rngs)
        self.moe = MoE(config, run_experts, rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Routing]:  # [B, S, H]
        x += self.attention(self.attention_norm(x))
        tokens = self.moe_norm(x).reshape(-1, x.shape[-1])  # [B · S, H]
        output, routing = self.moe(tokens)
        return x + output.reshape(x.shape), routing


class LanguageModel(nnx.Module):
    """Maps bytes to logits of the next byte."""

    def __init__(self, config: ModelConfig, run_experts: RunExperts, rngs: nnx.Rngs):
        size = config.hidden_size
        self.embedding = nnx.Embed(config.vocabulary, size, rngs=rngs)
        self.position = nnx.Embed(config.context, size, rngs=rngs)
        blocks = [Block(config, run_experts, rngs) for _ in range(config.n_layers)]
        self.blocks = nnx.List(blocks)
        self.norm = nnx.RMSNorm(size, rngs=rngs)
        self.head = linear(size, config.vocabulary, rngs)

    def __call__(self, text: jax.Array) -> tuple[jax.Array, Routing]:  # int32[B, S]
        x = self.embedding(text) + self.position(jnp.arange(text.shape[1]))
        routings = []
        for block in self.blocks:
            x, routing = block(x)
            routings.append(routing)
        by_layer = jax.tree.map(lambda *layers: jnp.stack(layers), *routings)
        return self.head(self.norm(x)), by_layer


def linear(n_in: int, n_out: int, rngs: nnx.Rngs) -> nnx.Linear:
    """Returns a linear layer without bias."""
    return nnx.Linear(n_in, n_out, use_bias=False, rngs=rngs)
