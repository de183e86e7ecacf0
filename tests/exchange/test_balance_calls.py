"""The kernels that say where choices go. Tests of balance run them on GPUs, too."""

import dataclasses

import jax
import numpy as np
import pytest

import cases
import oracle_balance as oracle
from harness import group_of
from jax_ep.config import EPConfig, RoutedSizes
from jax_ep.exchange.balance_calls import balance_choices_p, can_balance, count_choices_p


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the calls read of a geometry, for any number of ranks."""

    n_ranks: int
    config: EPConfig

    @property
    def routed(self) -> RoutedSizes:
        return self.config.routed(self.n_ranks)


def sizes(n_ranks: int, n_experts: int, n_slots: int = 1, n_nodes: int = 1) -> Sizes:
    return Sizes(
        n_ranks,
        EPConfig(
            n_experts=n_experts,
            top_k=1,
            hidden_size=128,
            max_tokens_per_rank=1 << 17,
            expert_copies=n_slots,
            n_nodes=n_nodes,
            fused_shared_expert=n_ranks > 2,
        ),
    )


@pytest.mark.parametrize(
    ("n_ranks", "n_experts", "wanted"),
    [(1, 744, True), (1, 745, False), (16, 512, True), (64, 256, True), (32, 512, False)],
)
def test_can_balance(n_ranks, n_experts, wanted):
    """Plans that fit into the shared memory of a block."""
    assert can_balance(sizes(n_ranks, n_experts)) is wanted


def draw_ids(rng, n_experts: int, n: int, exponent: float) -> np.ndarray:
    """`int32[n]`, some of which name no expert."""
    popularity = np.arange(1, n_experts + 1.0) ** -exponent
    ids = rng.choice(n_experts, n, p=popularity / popularity.sum())
    others = rng.choice((-1, -1, -2, -(2**31), n_experts, 2**31 - 1), n)
    return np.where(rng.random(n) < 0.05, others, ids).astype(np.int32)


@pytest.mark.gpu
@pytest.mark.parametrize("exponent", [0, 0.6, 2])
@pytest.mark.parametrize(
    ("of", "n"),
    [
        (sizes(1, 8), 1000),
        (sizes(2, 6), 1),
        (sizes(3, 9, 12), 0),
        (sizes(4, 12, 8), 5000),
        (sizes(4, 128, 6), 131072),
        (sizes(8, 256, 3, n_nodes=2), 5000),
        (sizes(16, 512, 4), 1000),
        (sizes(64, 256, 2, n_nodes=4), 100),
    ],
)
def test_the_kernels_match_the_oracle(of, n, exponent):
    """Each rank in turn, on one GPU."""
    group_of(cases.SMALL[1], "p2p")  # loads the kernels
    n_ranks, config = of.n_ranks, of.config
    n_experts, n_slots, n_shared = config.n_experts, config.expert_copies, n_ranks > 2
    rng = np.random.default_rng(n)
    ids = [draw_ids(rng, n_experts, n, exponent) for _ in range(n_ranks)]
    count = jax.jit(lambda ids: count_choices_p.bind(ids, n_experts=n_experts))
    place = jax.jit(lambda *operands: balance_choices_p.bind(*operands, geometry=of))
    counts, block_counts = zip(*map(count, ids), strict=True)
    for one, each in zip(counts, ids, strict=True):
        named = each[(each >= 0) & (each < n_experts)]
        np.testing.assert_array_equal(one, np.bincount(named, minlength=n_experts))
    per_token = [each[:, None] for each in ids]
    copies, routed = oracle.balance(per_token, n_experts, n_slots, config.nodes(n_ranks)[1])
    for rank, each in enumerate(ids):
        coordinate = np.int32(n_ranks + rank)  # of the second replica
        found = place(coordinate, each, block_counts[rank], np.stack(counts))
        to, group = routed[rank][:, 0].T
        wanted = to * of.routed.n_local_groups + n_shared + group
        wanted = np.where(to >= 0, wanted, np.where(each == -1, -1, -2))
        np.testing.assert_array_equal(found[0], wanted)
        np.testing.assert_array_equal(found[1], copies)
