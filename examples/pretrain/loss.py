"""Cross-entropy of a large vocabulary, without all logits at once."""

import functools
from typing import Any

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def cross_entropy(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, n_chunks: int
) -> jax.Array:
    """Returns the mean loss in nats per token, float32[].

    The sequences are cut into `n_chunks`. The forward pass makes the logits of one chunk after the
    other, and at once their gradients, so that nothing is computed twice.

    Args:
        hidden: [B, S, H].
        head: [H, V], in the same dtype.
        targets: int32[B, S].
        n_chunks: must divide S.
    """
    return _forward(hidden, head, targets, n_chunks)[0]


def _forward(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, n_chunks: int
) -> tuple[jax.Array, Any]:
    def chunk(d_head: jax.Array, inputs: Any) -> Any:
        x, wanted = inputs  # [B, S / n_chunks, H], [B, S / n_chunks]
        logits = (x @ head).astype(jnp.float32)
        log_sum = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        is_wanted = wanted[..., None] == jnp.arange(head.shape[1], dtype=wanted.dtype)
        losses = log_sum[..., 0] - jnp.where(is_wanted, logits, 0).sum(axis=-1)
        d_logits = jnp.exp(logits - log_sum) - is_wanted.astype(jnp.float32)
        d_logits = (d_logits / targets.size).astype(x.dtype)
        d_head += jnp.einsum("bsh,bsv->hv", x, d_logits, preferred_element_type=jnp.float32)
        return d_head, (losses.sum(), d_logits @ head.T)

    def cut(array: jax.Array) -> jax.Array:  # [n_chunks, B, S / n_chunks, ...]
        batch, length, *rest = array.shape
        return array.reshape(batch, n_chunks, length // n_chunks, *rest).swapaxes(0, 1)

    zeros = jnp.zeros(head.shape, jnp.float32)
    d_head, (losses, d_hidden) = jax.lax.scan(chunk, zeros, (cut(hidden), cut(targets)))
    d_hidden = d_hidden.swapaxes(0, 1).reshape(hidden.shape)
    return losses.sum() / targets.size, (d_hidden, d_head.astype(head.dtype))


def _backward(n_chunks: int, gradients: Any, d_loss: jax.Array) -> Any:
    d_hidden, d_head = (x * d_loss.astype(x.dtype) for x in gradients)
    return d_hidden, d_head, None


cross_entropy.defvjp(_forward, _backward)
