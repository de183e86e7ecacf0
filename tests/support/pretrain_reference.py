"""Prints the loss of examples/pretrain's model, and that by its formulas, in NumPy and float64.

Usage: python pretrain_reference.py EXAMPLE_FOLDER EXPERTS
"""

import sys

import jax.numpy as jnp
import numpy as np
from flax import nnx

sys.path.insert(0, sys.argv[1])

from experts import make_group, moe_of
from layout import make_mesh
from model import Transformer
from sizes import TINY

LENGTH = 16


def main() -> None:
    mesh = make_mesh(1, 1)
    group = make_group(mesh, TINY, 2 * LENGTH, jnp.float32, None, 0, "auto")
    create_moe = moe_of(sys.argv[2], mesh, TINY, jnp.float32, group)
    options = {"dtype": jnp.float32, "remat": False, "loss_chunks": 2}
    model = Transformer(TINY, mesh, create_moe, nnx.Rngs(0), **options)
    rng = np.random.default_rng(0)
    for _, param in nnx.iter_graph(model):
        # Larger than at first, so that every part matters.
        if isinstance(param, nnx.Param) and param is not model.embedding.kernel:
            shape = param.shape
            values = rng.uniform(0.5, 2, shape) if len(shape) == 1 else rng.normal(0, 0.2, shape)
            param[...] = jnp.asarray(values, jnp.float32)
    windows = rng.integers(TINY.vocabulary, size=(2, LENGTH + 1))
    loss, _ = nnx.jit(lambda model, windows: model(windows))(model, jnp.asarray(windows))
    print(float(loss), np.mean([loss_of(model, window) for window in windows]))


def loss_of(model, window) -> float:
    """The mean loss of one sequence."""
    x = of(model.embedding.kernel)[window[:-1]]
    for block in model.blocks:
        x = x + attention(block.attention, normalize(x, block.attention_norm))
        tokens = normalize(x, block.moe_norm)
        x = x + np.stack([experts(block.moe, token) for token in tokens])
    logits = normalize(x, model.norm) @ of(model.head.kernel)
    return float(
        np.mean([-np.log(softmax(row)[i]) for row, i in zip(logits, window[1:], strict=True)])
    )


def attention(layer, x):  # [S, H]
    n_q, n_kv, size = TINY.n_heads, TINY.n_kv_heads, TINY.head_size
    heads = (x @ of(layer.qkv.kernel)).reshape(LENGTH, n_q + 2 * n_kv, size)
    result = np.zeros((LENGTH, n_q, size))
    for head in range(n_q):
        of_group = n_q + head // (n_q // n_kv)
        q = rotate(normalize(heads[:, head], layer.q_norm))
        k = rotate(normalize(heads[:, of_group], layer.k_norm))
        v = heads[:, of_group + n_kv]
        for i in range(LENGTH):
            result[i, head] = softmax(k[: i + 1] @ q[i] / np.sqrt(size)) @ v[: i + 1]
    return result.reshape(LENGTH, -1) @ of(layer.out.kernel)


def rotate(x):  # [S, head size]
    """Multiplies complex numbers by others of absolute value 1."""
    half = x.shape[1] // 2
    frequencies = TINY.rope_theta ** (-np.arange(half) / half)
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(
        1j * np.outer(np.arange(LENGTH), frequencies)
    )
    return np.concatenate([turned.real, turned.imag], axis=1)


def experts(layer, x):  # [H]
    probabilities = softmax(x @ of(layer.router))
    chosen = np.argsort(-probabilities)[: TINY.top_k]
    output = 0
    for expert in chosen:
        gate, up = np.split(x @ of(layer.gate_up)[expert], 2)
        weight = probabilities[expert] / probabilities[chosen].sum()
        output += weight * (gate / (1 + np.exp(-gate)) * up) @ of(layer.down)[expert]
    return output


def normalize(x, norm):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * of(norm.scale)


def softmax(x):
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def of(param):
    return np.asarray(param[...], np.float64)


if __name__ == "__main__":
    main()
