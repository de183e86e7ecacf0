"""The router's matmuls are float32 on every platform, with JAX's default settings.

On GPUs, those are TF32 for float32 matmuls: the operands are rounded to 10 bits of mantissa.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_ep
from jax_ep.nnx import MoE
from nnx_layers import make_mesh

T, H, E, K = 2048, 4096, 256, 8
MAX_ERROR = 1e-5

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.fixture(scope="module")
def layer():
    config = jax_ep.EPConfig(
        n_experts=E,
        top_k=K,
        hidden_size=H,
        max_tokens_per_rank=T,
        token_format=jax_ep.Plain(jnp.float32),
        combine_dtype=jnp.float32,
    )
    group = jax_ep.ep_init(make_mesh({"ep": 1}), "ep", config, transport="xla")
    return MoE(group, 1, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).standard_normal((T, H)).astype(np.float32)


def z_loss(layer, tokens):
    _, report = layer(tokens)
    return report.z_loss, report.topk_ids


def as_tf32(x):
    return ((x.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)


def exact(tokens, router):
    """The logits, and the gradients of the z-loss in tokens and router."""
    tokens, router = tokens.astype(np.float64), router.astype(np.float64)
    logits = tokens @ router
    exp = np.exp(logits)
    sums = exp.sum(axis=-1, keepdims=True)
    of_logits = 2 * np.log(sums) * exp / sums / len(tokens)
    return logits, of_logits @ router.T, tokens.T @ of_logits


def errors(wanted, topk_ids, *gradients):
    """How far the chosen logits are below the K highest, and the relative errors of gradients."""
    logits, *exact_gradients = wanted
    chosen = np.take_along_axis(logits, topk_ids, axis=-1).min(axis=-1)
    pairs = zip(gradients, exact_gradients, strict=True)
    norm = np.linalg.norm
    return [
        (np.sort(logits)[:, -K] - chosen).max(),
        *(norm(np.asarray(got) - exact) / norm(exact) for got, exact in pairs),
    ]


@pytest.mark.thorough
def test_the_layer_has_the_choices_and_gradients_of_float32(layer, tokens):
    assert jax.config.jax_default_matmul_precision is None
    grad = nnx.jit(nnx.grad(z_loss, argnums=(0, 1), has_aux=True))
    (of_layer, of_tokens), topk_ids = grad(layer, tokens)
    router = np.asarray(layer.router[...])
    wanted = exact(tokens, router)
    got = errors(wanted, np.asarray(topk_ids), of_tokens, of_layer.router[...])
    assert max(got) < MAX_ERROR, got

    logits, *gradients = exact(as_tf32(tokens), as_tf32(router))
    in_tf32 = errors(wanted, np.argsort(-logits, axis=-1)[:, :K], *gradients)
    assert min(in_tf32) > 10 * MAX_ERROR, in_tf32


def test_the_program_asks_for_float32_in_all_matmuls_of_the_router(layer, tokens):
    """The forward and both gradients."""
    graph, state = nnx.split(layer)

    def loss(state, tokens):
        return z_loss(nnx.merge(graph, state), tokens)[0]

    text = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(state, tokens).lower().as_text()
    dots = [line for line in text.splitlines() if re.search(rf"dot_general.*x{E}xf32>", line)]
    assert len(dots) == 3 and all("precision = [HIGHEST, HIGHEST]" in line for line in dots), dots
