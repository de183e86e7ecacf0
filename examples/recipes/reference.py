"""The reference of the recipes: a dense layer, on one device, without `jax_ep`."""

import jax
import jax.numpy as jnp
import numpy as np


def dense_experts(tokens, topk_ids, topk_weights, gate_up, down):
    """Σ_k topk_weights[k] · expert[topk_ids[k]](token), with every expert on every token."""
    gates = jnp.einsum("...k,...ke->...e", topk_weights, jax.nn.one_hot(topk_ids, len(down)))
    gate, up = jnp.split(jnp.einsum("...h,ehf->...ef", tokens, gate_up), 2, axis=-1)
    return jnp.einsum("...e,...ef,efh->...h", gates, jax.nn.silu(gate) * up, down)


def normal(*shapes, key=None):
    """Random arrays; matrices are scaled to keep the size of what they multiply."""
    keys = jax.random.split(jax.random.key(0) if key is None else key, len(shapes))
    scales = [shape[-2] ** -0.5 if len(shape) > 1 else 1.0 for shape in shapes]
    each = zip(keys, shapes, scales, strict=True)
    return [jax.random.normal(key, shape) * scale for key, shape, scale in each]


def assert_close(got, wanted, error=1e-4):
    """Requires equal trees of arrays, up to a relative error of each."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        found = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert found < error, found
