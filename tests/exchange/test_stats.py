"""`EPGroup.stats`: totals that follow from `topk_ids`, counted independently here."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

import jax_ep

pytestmark = pytest.mark.usefixtures("one_process")
DP, R, L, K, H, T = 2, 4, 2, 3, 8, 5
E = R * L
CAPACITY = 12


@pytest.fixture
def group(one_process):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: DP * R]).reshape(DP, R), ("dp", "ep"))
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


def run_layer(group, topk_ids: np.ndarray, recv_capacity: int | None = None) -> None:
    def layer(tokens: jax.Array, ids: jax.Array) -> jax.Array:
        dispatched = jax_ep.dispatch(group, tokens, ids, recv_capacity=recv_capacity)
        return jax_ep.combine(group, dispatched.tokens, dispatched)

    spec = jax.P(("dp", "ep"))
    mapped = jax.shard_map(layer, mesh=group.mesh, in_specs=spec, out_specs=spec)
    tokens = jnp.ones((DP * R * T, H), jnp.bfloat16)
    jax.block_until_ready(jax.jit(mapped)(tokens, topk_ids.reshape(-1, group.config.top_k)))


def count(ids: np.ndarray) -> dict[str, np.ndarray]:
    """Totals of one replica; ids [R, T, K]."""
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
            assert isinstance(totals, jax_ep.RankStats)
            replica, rank = divmod(totals.device, R)
            assert (totals.replica, totals.rank) == (replica, rank)
            assert totals.dispatch_calls == totals.combine_calls == n_calls
            for name, expected in count(ids[replica]).items():
                actual = getattr(totals, name)
                np.testing.assert_array_equal(actual, n_calls * expected[rank], name)
                assert isinstance(actual, int) or actual.dtype == np.int64
    assert sum(totals.dropped_rows for totals in group.stats()) > 0


def test_equal_groups_share_stats_until_the_last_is_closed(group):
    equal = jax_ep.ep_init(group.mesh, "ep", group.config, transport="host")
    assert equal == group
    assert hash(equal) == hash(group)
    run_layer(equal, np.zeros((DP, R, T, K), np.int32))
    equal.close()
    assert group.stats()[0].dispatch_calls == 1


def test_the_last_rank_to_arrive_waits_for_no_other(group):
    run_layer(group, np.zeros((DP, R, T, K), np.int32))
    for replica in range(DP):
        ranks = [totals for totals in group.stats() if totals.replica == replica]
        waits = np.stack([totals.wait_s for totals in ranks])  # [R, 2, R]
        assert waits.dtype == np.float64
        for call in range(2):
            waited = waits[:, call]
            assert np.isfinite(waited).all()
            assert (waited >= 0).all()
            assert (waited == 0).all(axis=1).any()
            # At most one of two ranks has waited for the other.
            assert (np.minimum(waited, waited.T) == 0).all()
        for totals in ranks:
            np.testing.assert_array_equal(totals.wait_s, totals.longest_wait_s)


def test_the_traffic_figure_shows_the_stats(group, tmp_path):
    ids = np.random.default_rng(6).integers(0, E, (DP, R, T, K)).astype(np.int32)
    run_layer(group, ids)
    stats = group.stats()
    figure = jax_ep.plot_traffic(stats[::-1])
    titles = [axes.get_title() for axes in figure.axes[:3]]
    assert titles == ["rows sent", "ms waited in dispatch", "ms waited in combine"]
    drawn = [np.asarray(axes.images[0].get_array()) for axes in figure.axes[:3]]
    expected = np.concatenate([count(each)["rows_to_expert"] for each in ids])
    np.testing.assert_array_equal(drawn[0], expected)
    for call, matrix in enumerate(drawn[1:]):
        waits = [1e3 * totals.wait_s[call] for totals in stats]
        np.testing.assert_allclose(matrix, waits)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == [f"{replica}: {rank}" for replica in range(DP) for rank in range(R)]
    assert figure.axes[0].get_ylabel() == "replica: rank"
    figure.savefig(tmp_path / "traffic.png")
    assert (tmp_path / "traffic.png").stat().st_size > 1000


def test_the_traffic_figure_may_be_part_of_another(group):
    left, right = Figure().subfigures(1, 2)
    assert jax_ep.plot_traffic(group.stats(), right) is right
    assert [axes.get_title() for axes in right.axes[:1]] == ["rows sent"]
    assert not left.axes


def test_the_traffic_of_no_rank_or_of_several_groups_is_rejected(group):
    with pytest.raises(ValueError, match="of one group; got .* = \\[\\]"):
        jax_ep.plot_traffic([])
    one = group.stats()[0]
    other = dataclasses.replace(one, rows_to_expert=np.zeros(E + R, np.int64))
    with pytest.raises(ValueError, match="of one group"):
        jax_ep.plot_traffic([one, other])


def test_without_matplotlib_the_error_names_the_extra(group, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'jax_ep\[plot\]'"):
        jax_ep.plot_traffic(group.stats())


def counts_of(n_ranks: int, n_groups: int) -> dict:
    """Statistics as an extension returns them, with all numbers different."""
    numbers = iter(range(1, 1000))

    def take(n: int) -> list[int]:
        return [next(numbers) for _ in range(n)]

    return dict(
        dispatch_calls=next(numbers),
        combine_calls=next(numbers),
        invalid_ids=next(numbers),
        dropped_rows=next(numbers),
        tokens_to_rank=take(n_ranks),
        bytes_to_rank=take(n_ranks),
        rows_to_group=take(n_ranks * n_groups),
        rows_per_group=take(n_groups),
        wait_ns=take(2 * n_ranks),
        longest_wait_ns=take(2 * n_ranks),
    )


def test_stats_leave_out_the_rows_of_a_shared_expert(group):
    coordinate = group.geometry.local_coordinates[2]
    counts = counts_of(R, L + 1)
    stats = jax_ep.RankStats.from_counts(group.geometry, coordinate, counts)
    sent = np.reshape(counts["rows_to_group"], (R, L + 1))[:, 1:]
    np.testing.assert_array_equal(stats.rows_to_expert, sent.ravel())
    np.testing.assert_array_equal(stats.rows_per_expert, counts["rows_per_group"][1:])
    np.testing.assert_array_equal(stats.tokens_to_rank, counts["tokens_to_rank"])
    waits = np.reshape(counts["wait_ns"], (2, R)) * 1e-9
    np.testing.assert_array_equal(stats.wait_s, waits)


@pytest.mark.parametrize("n_shared", [0, 1])
def test_with_one_routed_rank_stats_have_only_rows_of_own_experts(group, n_shared):
    coordinate = group.geometry.local_coordinates[2]
    counts = counts_of(1, L + n_shared)
    stats = jax_ep.RankStats.from_counts(group.geometry, coordinate, counts)
    expected = np.zeros((R, L), np.int64)
    expected[2] = counts["rows_to_group"][n_shared:]
    np.testing.assert_array_equal(stats.rows_to_expert, expected.ravel())
    assert not stats.tokens_to_rank.any()
    assert not stats.bytes_to_rank.any()
    assert stats.tokens_to_rank.shape == stats.bytes_to_rank.shape == (R,)
    assert stats.wait_s.shape == stats.longest_wait_s.shape == (2, R)
    assert stats.wait_s[0, 2] == pytest.approx(counts["wait_ns"][0] * 1e-9)
    assert (stats.dispatch_calls, stats.combine_calls) == (1, 2)
    assert (stats.invalid_ids, stats.dropped_rows) == (3, 4)


def test_a_group_warns_once_of_dropped_rows(group, caplog):
    """In `stats` or, if nobody asks for them, when it is closed."""
    ids = np.zeros((DP, R, T, K), np.int32)
    ids[1] = -1  # the second replica has no rows
    dropped = R * T * K - CAPACITY
    run_layer(group, np.full_like(ids, -1))
    group.stats()
    assert not caplog.records
    run_layer(group, ids)
    group.stats()
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("jax_ep", "WARNING")
    assert (
        f"Group {group.key} has dropped {dropped} rows, on ranks 0 (replica 0)," in record.message
    )
    group.stats()
    group.close()
    assert len(caplog.records) == 1
    other = jax_ep.ep_init(group.mesh, "ep", dataclasses.replace(group.config, name="other"))
    run_layer(other, ids)
    other.close()
    assert "Group other-host-ep4-" in caplog.records[-1].message
    other.close()
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("options", "of_call", "advice"),
    [
        ({"recv_capacity": R * T * L - 1}, None, "Raise recv_capacity, or balance the experts"),
        ({"top_k": L}, 4, "Raise the recv_capacity of the dispatch, or balance the experts"),
        ({}, None, "cannot be larger: let each token name an expert at most once, or raise the"),
        ({"recv_capacity": R * T * L}, 4, "raise the recv_capacity of a dispatch that has its own"),
    ],
    ids=["small", "own", "largest", "given"],
)
def test_the_warning_of_drops_says_what_helps(options, of_call, advice, group, caplog):
    """Of two experts on a rank, each token names one K times."""
    defaults = {"recv_capacity": None, "name": "other"}
    config = dataclasses.replace(group.config, **defaults | options)
    with jax_ep.ep_init(group.mesh, "ep", config, transport="host") as other:
        run_layer(other, np.zeros((DP, R, T, config.top_k), np.int32), of_call)
    assert advice in caplog.records[-1].message
