"""Layers under `jax.checkpoint` and `jax.vmap`, and how many calls their programs have."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np

import cases
import jax_ep
import suite
from harness import put

CASE = cases.SMALL[4]
N_LAYERS = 3


def moe(group, tokens, topk_ids, topk_weights):
    """A layer whose experts double their rows, with a residual connection."""
    dispatched = jax_ep.dispatch(group, tokens, topk_ids)
    rows = dispatched.tokens * jnp.bfloat16(2)
    return jax_ep.combine(group, rows, dispatched, topk_weights, residual=tokens)


def operands_of(mesh, case=CASE) -> list[jax.Array]:
    """Tokens, ids and weights of all ranks; weights without NaN."""
    tokens, topk_ids, topk_weights = suite.make_inputs(case).arrays()[:3]
    return put(mesh, tokens, topk_ids, [np.nan_to_num(w) for w in topk_weights])


def n_calls(compiled) -> int:
    """Calls that move data in a compiled program: ours, or XLA's collectives."""
    ours = r'custom_call_target="[^"]*(?:jax_ep_(?!check)|dispatch|combine)[^"]*"'
    xla = r"= \S+ (?:all-to-all|all-gather|collective-permute|all-reduce)(?:-start)?\("
    text = compiled.as_text()
    return len(re.findall(ours, text)) or len(re.findall(xla, text))


def layers(group, wrap=lambda layer: layer):
    """The value and the gradients of a loss of `N_LAYERS` layers."""
    layer = wrap(functools.partial(moe, group))

    def loss(tokens, topk_ids, topk_weights):
        for _ in range(N_LAYERS):
            # The factor is exact, however XLA fuses it.
            tokens = layer(tokens, topk_ids, topk_weights) * jnp.bfloat16(0.25)
        return jnp.sum(tokens.astype(jnp.float32))

    return jax.value_and_grad(loss, argnums=(0, 2))


def saving(*names):
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    return functools.partial(jax.checkpoint, policy=policy)


# How a layer is checkpointed.
CHECKPOINTED = {
    "plain": lambda layer: layer,
    "nothing saved": jax.checkpoint,
    "dispatch saved": saving(jax_ep.DISPATCH_NAME),
    "both saved": saving(jax_ep.DISPATCH_NAME, jax_ep.COMBINE_NAME),
}


def both_signs_mapped(layer, tokens, topk_ids, topk_weights):
    """`vmap` of a layer over the tokens and their negatives."""
    both = jnp.stack([tokens, -tokens])
    return jax.vmap(layer, in_axes=(0, None, None))(both, topk_ids, topk_weights)


def both_signs_looped(layer, tokens, topk_ids, topk_weights):
    return jnp.stack([layer(x, topk_ids, topk_weights) for x in (tokens, -tokens)])
