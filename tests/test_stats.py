"""EPGroup.stats: totals that follow from topk_ids, counted afresh here."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep

DP, R, L, K, H, T = 2, 4, 2, 3, 8, 5
E = R * L
CAPACITY = 12


@pytest.fixture
def group():
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()[: DP * R]).reshape(DP, R), ("dp", "ep")
    )
    config = jax_ep.EPConfig(
        n_experts=E,
        top_k=K,
        hidden_size=H,
        max_tokens_per_rank=T,
        recv_capacity=CAPACITY,
        timeout_s=37,
    )
    with jax_ep.ep_init(mesh, "ep", config, transport="host") as group:
        yield group


def run_layer(group, topk_ids: np.ndarray) -> None:
    def layer(tokens: jax.Array, ids: jax.Array) -> jax.Array:
        dispatched = jax_ep.dispatch(group, tokens, ids)
        return jax_ep.combine(group, dispatched.tokens, dispatched)

    spec = jax.P(("dp", "ep"))
    mapped = jax.shard_map(layer, mesh=group.mesh, in_specs=spec, out_specs=spec)
    tokens = jnp.ones((DP * R * T, H), jnp.bfloat16)
    jax.block_until_ready(jax.jit(mapped)(tokens, topk_ids.reshape(-1, K)))


def count(ids: np.ndarray) -> dict[str, np.ndarray]:
    """Totals of one row of ranks; ids [R, T, K]."""
    valid = (ids >= 0) & (ids < E)
    rows_to_expert = np.zeros((R, E), np.int64)
    tokens_to_rank = np.zeros((R, R), np.int64)
    for rank, token, k in np.argwhere(valid):
        rows_to_expert[rank, ids[rank, token, k]] += 1
    for rank in range(R):
        for token in range(T):
            for peer in {i // L for i in ids[rank, token][valid[rank, token]]}:
                tokens_to_rank[rank, peer] += 1
    arriving = rows_to_expert.sum(0).reshape(R, L)
    ends = np.minimum(np.cumsum(arriving, axis=1), CAPACITY)
    return dict(
        rows_to_expert=rows_to_expert,
        tokens_to_rank=tokens_to_rank,
        bytes_to_rank=tokens_to_rank * H * 2,
        rows_per_expert=np.diff(ends, axis=1, prepend=0),
        dropped_rows=np.maximum(arriving.sum(1) - CAPACITY, 0),
        invalid_ids=((ids < -1) | (ids >= E)).sum((1, 2)),
    )


def test_stats_count_what_was_sent_received_and_dropped(group):
    ids = np.random.default_rng(5).integers(-2, E + 1, (DP, R, T, K)).astype(np.int32)
    for n_calls in (1, 2):
        run_layer(group, ids)
        for totals in group.stats():
            row, rank = divmod(totals["device"], R)
            assert totals["rank"] == rank
            assert totals["dispatch_calls"] == totals["combine_calls"] == n_calls
            for name, expected in count(ids[row]).items():
                np.testing.assert_array_equal(
                    totals[name], n_calls * expected[rank], name
                )
    assert sum(totals["dropped_rows"] for totals in group.stats()) > 0


def test_groups_with_equal_arguments_are_one_until_the_last_is_closed(group):
    twin = jax_ep.ep_init(group.mesh, "ep", group.config, transport="host")
    assert twin == group
    assert hash(twin) == hash(group)
    run_layer(twin, np.zeros((DP, R, T, K), np.int32))
    twin.close()
    assert group.stats()[0]["dispatch_calls"] == 1
