"""Programs on `p2p` that XLA captures in CUDA graphs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import cases
import jax_ep
import suite
from harness import AXIS, on_mesh, put
from jax_ep.ffi.extension import load_cuda
from jax_ep.transports.workspaces import ordinal

N_PAIRS = 4


class Chain:
    """Pairs of dispatch and combine in one compiled program.

    Each run returns the bytes of this process's results, and frees its arrays, so that those of the
    next run have the same addresses.
    """

    def __init__(self, group: jax_ep.EPGroup) -> None:
        def chain(tokens, topk_ids):
            for _ in range(N_PAIRS):
                rows = jax_ep.dispatch(group, tokens, topk_ids)
                tokens = jnp.tanh(jax_ep.combine(group, rows.tokens, rows))
            return tokens

        inputs = suite.make_inputs(cases.SMALL[group.n_ranks])
        self.operands = put(group.mesh, *inputs.arrays()[:2])
        self.compiled = on_mesh(group.mesh, chain).lower(*self.operands).compile()

    def __call__(self) -> list[bytes]:
        out = jax.block_until_ready(self.compiled(*self.operands))
        return [np.asarray(shard.data).tobytes() for shard in out.addressable_shards]


def group_of_equal_size(mesh, config: jax_ep.EPConfig) -> jax_ep.EPGroup:
    """A group that would get a closed group's memory if that were free."""
    other = dataclasses.replace(config, timeout_s=config.timeout_s + 30)
    return jax_ep.ep_init(mesh, AXIS, other, transport="p2p")


def is_captured(group: jax_ep.EPGroup) -> bool:
    here = group.geometry.local_coordinates
    return all(load_cuda().is_captured(group.geometry.memory_key, ordinal(each)) for each in here)
