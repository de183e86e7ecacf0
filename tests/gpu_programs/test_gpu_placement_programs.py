"""place_choices as XLA compiles it for GPUs; see test_gpu_programs.py."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from gpu_compiler import FREE, group_of
from gpu_compiler import mesh as mesh
from harness import AXIS

R, E, N_REDUNDANT, K = 4, 256, 32, 8


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("local_first", [False, True])
@pytest.mark.parametrize("n_tokens", [8, 128])
def test_choosing_copies_is_two_kernels(mesh, n_tokens, local_first, counted) -> None:
    """One of them counts. Beside the rank, which a program reads once."""
    config = jax_ep.EPConfig(
        n_experts=E + N_REDUNDANT, top_k=K, hidden_size=64, max_tokens_per_rank=n_tokens
    )
    group = group_of(mesh, config)
    with jax.default_device(jax.devices("cpu")[0]):
        logical = jax_ep.rebalance(1 / np.arange(1, E + 1), R, N_REDUNDANT)
        placement = jax_ep.ExpertPlacement(logical, R, local_first=local_first)

    def place(ids, placement):
        placed = jax_ep.place_choices(group, ids, placement)
        return placed.topk_ids, placed.n_unserved[None] if counted else None

    def types(tree, spec):
        sharding = jax.NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    specs = jax.P(AXIS), jax.P()
    mapped = jax.shard_map(place, mesh=mesh, in_specs=specs, out_specs=jax.P(AXIS))
    operands = jax.ShapeDtypeStruct((R * n_tokens, K), jnp.int32), placement
    program = jax.jit(mapped).lower(*map(types, operands, specs)).compile()
    (entry,) = re.findall(r"^ENTRY .*?^}", program.as_text(), re.MULTILINE | re.DOTALL)
    steps = re.findall(r"^ +(?:ROOT )?%\S+ = .*? ([a-z\-]+)\(", entry, re.MULTILINE)
    steps = sorted(step for step in steps if step not in FREE)
    assert steps == ["fusion", "fusion", "partition-id"]
