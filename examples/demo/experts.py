"""Tokens to their experts and back, with expert parallelism and without.

Both functions compute the same sum over a token's choices,
Σ_k topk_weights[k] · expert[topk_ids[k]](token). The first uses `jax_ep`; the second is the
reference that it is compared with.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep
from model import RunExperts

AXIS = "ep"


def expert_parallel(mesh: Mesh, group: jax_ep.EPGroup) -> RunExperts:
    """Returns `run_experts` over the ranks of `mesh`, each of which holds its own experts."""

    # Arrays are this rank's shard: its experts [L, ...], its tokens [T, H].
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
    def on_each_rank(gate_up, down, tokens, topk_ids, topk_weights):
        rows = jax_ep.dispatch(group, tokens, topk_ids, topk_weights)
        results = jax_ep.expert_mlp(rows, gate_up, down)
        output = jax_ep.combine(group, results, rows)
        return output, rows.n_dropped[None]

    def run_experts(*arrays):
        output, n_dropped = on_each_rank(*arrays)
        return output, n_dropped.sum()

    return run_experts


def dense(gate_up, down, tokens, topk_ids, topk_weights):
    """`run_experts` on one device: every expert processes every token."""
    weights = jax.nn.one_hot(topk_ids, len(gate_up)) * topk_weights[..., None]  # [N, K, E]
    gate, up = jnp.split(jnp.einsum("nh,ehf->enf", tokens, gate_up), 2, axis=-1)
    results = jnp.einsum("enf,efh->enh", jax.nn.silu(gate) * up, down)
    return jnp.einsum("nke,enh->nh", weights, results), jnp.int32(0)
