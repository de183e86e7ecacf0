"""Choices of experts that have copies: where they go, against the oracle."""

import jax
import numpy as np

import jax_ep
import oracle_placement as oracle
from harness import AXIS, assert_same_bits, make_mesh

R, E, K, T = 4, 8, 3, 40
BY_RANK = jax.P(AXIS)


def open_group(transport, mesh=None, n_ranks=R, n_physical=12, **options):
    defaults = {"n_experts": n_physical, "top_k": K, "hidden_size": 16, "max_tokens_per_rank": T}
    mesh = make_mesh(n_ranks) if mesh is None else mesh
    return jax_ep.ep_init(mesh, AXIS, jax_ep.EPConfig(**defaults | options), transport)


def make_ids(low=-2, n_ranks=R, n_experts=E, n_tokens=T):
    """`[R, T, K]`: different experts of each token, and some ids that are none."""
    rng = np.random.default_rng(0)
    keys = rng.random((n_ranks, n_tokens, n_experts + 2 - low))
    return (np.argsort(keys, axis=-1)[..., :K] + low).astype(np.int32)


def place(group, ids, placement):
    """Physical ids `[R, T, K]` and unserved choices `[R]`; the placement is an argument."""

    def body(ids, placement):
        placed = jax_ep.place_choices(group, ids[0], placement)
        return placed.topk_ids[None], placed.n_unserved[None]

    mapped = jax.shard_map(
        body, mesh=group.mesh, in_specs=(BY_RANK, jax.P()), out_specs=(BY_RANK, BY_RANK)
    )
    return jax.jit(mapped)(ids, placement)


def assert_shards(got, wanted, what):
    """Compares those of this process."""
    for shard in got.addressable_shards:
        assert_same_bits(shard.data, wanted[shard.index], what)


def check_choices_of_every_process() -> None:
    """A target of `processes.run_processes`; the processes may share a GPU."""
    n_ranks = len(jax.devices())
    logical = random_placement(np.random.default_rng(0), n_ranks, 3, 1)
    group = open_group("auto", n_ranks=n_ranks, n_physical=len(logical))
    ids, mask = make_ids(n_ranks=n_ranks, n_experts=3 * n_ranks), np.arange(n_ranks) > 0
    for local_first in (False, True):
        placement = jax_ep.ExpertPlacement(logical, n_ranks, local_first=local_first)
        got = place(group, ids, placement.mask_ranks(mask))
        wanted = oracle.place(ids, logical, mask=mask, local_first=local_first)
        assert wanted[1].any()
        for one, other, what in zip(got, wanted, ("choices", "unserved choices"), strict=True):
            assert_shards(one, other.astype(np.int32), what)
    group.close()


def random_placement(rng, n_ranks, n_home, n_redundant):
    """Any experts anywhere, each at least once, at most once on a rank."""
    n_experts = n_ranks * n_home
    load = rng.random(n_experts) ** 4
    slack = float(rng.choice([0, 0.2, 10]))
    return jax_ep.rebalance(load, n_ranks, n_redundant * n_ranks, home_slack=slack)
