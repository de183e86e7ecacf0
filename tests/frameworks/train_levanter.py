"""Trains one tiny layer of grug, Levanter's MoE, on 8 CPU devices; prints the steps as JSON.

Usage: train_levanter.py [--jax-ep] [--capacity-factor=F] [--remat] [--all-words]
"""

import argparse
import functools
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import P
from jax.sharding import reshard
from levanter.grug.grug_moe import MOE_REMAT_SAVE_NAMES, MoEExpertMlp, QBRoutedMoE
from levanter.grug.sharding import compact_grug_mesh

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "float32")
N_WORDS, HIDDEN, N_EXPERTS, TOP_K, N_TOKENS = 64, 32, 16, 2, 256
TOKENS = P(("replica_dcn", "data", "expert"))


class Model(eqx.Module):
    """Predicts a word from another: an embedding, experts and a linear layer."""

    embedding: jax.Array
    router: jax.Array
    router_bias: jax.Array
    experts: MoEExpertMlp
    output: jax.Array

    def __call__(self, words, is_word, mesh):
        x = self.embedding.at[words].get(out_sharding=TOKENS)
        moe = QBRoutedMoE(num_experts_per_token=TOP_K, batch_axes=TOKENS[0])
        router = {"router": self.router, "router_bias": self.router_bias}
        out, stats = moe(x, is_word, expert_mlp=self.experts, mesh=mesh, **router)
        return (x + out) @ self.output, stats


def make_model(mesh, options):
    keys = jax.random.split(jax.random.key(0), 4)
    experts = MoEExpertMlp.init(
        num_experts=N_EXPERTS,
        hidden_dim=HIDDEN,
        intermediate_dim=48,
        initializer_std=0.2,
        key=keys[0],
        implementation="ring",
        capacity_factor=options.capacity_factor,
    )
    if options.jax_ep:
        import jax_ep.integrations.levanter

        experts = jax_ep.integrations.levanter.expert_mlp(experts, mesh)
    shapes = (N_WORDS, HIDDEN), (HIDDEN, N_EXPERTS), (HIDDEN, N_WORDS)
    arrays = [jax.random.normal(k, s) / 4 for k, s in zip(keys[1:], shapes, strict=True)]
    return Model(*arrays[:2], jnp.zeros(N_EXPERTS), experts, arrays[2])


def loss(model, words, is_word, mesh, remat):
    forward = functools.partial(model, mesh=mesh.abstract_mesh)
    if remat:
        policy = jax.checkpoint_policies.save_only_these_names(*MOE_REMAT_SAVE_NAMES)
        forward = jax.checkpoint(forward, policy=policy)
    logits, stats = forward(words, is_word)
    wanted = (words * 7 + 3) % N_WORDS
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, wanted)
    return jnp.sum(losses * is_word) / jnp.sum(is_word), stats


@eqx.filter_jit
def train_step(model, state, words, is_word, mesh, optimizer, remat):
    value_and_grad = eqx.filter_value_and_grad(loss, has_aux=True)
    (error, stats), grads = value_and_grad(model, words, is_word, mesh, remat)
    results = {
        "loss": error,
        "experts_grad_norm": optax.global_norm(eqx.filter(grads.experts, eqx.is_array)),
        "dropped": stats["routing_receiver_drops"],
        "skipped": stats["skipped_assignments"],
    }
    updates, state = optimizer.update(grads, state)
    bias = -stats["qb_beta"]
    model = eqx.tree_at(lambda m: m.router_bias, eqx.apply_updates(model, updates), bias)
    return model, state, results


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--jax-ep", action="store_true")
    parser.add_argument("--remat", action="store_true")
    parser.add_argument("--all-words", action="store_true", help="no padding")
    parser.add_argument("--capacity-factor", type=float, default=2.0)
    options = parser.parse_args()
    mesh, optimizer = compact_grug_mesh(expert_axis_size=4), optax.adam(0.02)
    with jax.set_mesh(mesh):
        model = make_model(mesh, options)
        state = optimizer.init(eqx.filter(model, eqx.is_array))
        is_word = (jnp.arange(N_TOKENS) % 16 < 14) | options.all_words
        for step in range(5):
            words = jax.random.randint(jax.random.key(step), (N_TOKENS,), 0, N_WORDS)
            arrays = reshard(words, TOKENS), reshard(is_word, TOKENS)
            model, state, results = train_step(
                model, state, *arrays, mesh, optimizer, options.remat
            )
            print(json.dumps({name: float(value) for name, value in results.items()}))


if __name__ == "__main__":
    main()
