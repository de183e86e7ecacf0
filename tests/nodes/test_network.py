"""What crosses between nodes: a shim that limits and counts it, and the bytes that the plan says.

test_hosts.py puts the two together, on GPUs.
"""

import functools
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import hosts
import network_checks
import rail_traffic
from processes import Host, run_processes

SENDERS = pathlib.Path(__file__).parents[1] / "rigs" / "tcp_senders.py"
N_BYTES = 2_000_000
RATE = 8e6  # so low that a pause of a thread for some milliseconds does not matter


@pytest.fixture(scope="module")
def shims(tmp_path_factory):
    """The folder of the shims."""
    folder = tmp_path_factory.mktemp("shims")
    hosts.build_shims(folder)
    return folder


def send(shims, way, *rates, environment=None):
    """Seconds and counted bytes of sending `N_BYTES`, at each rate."""
    command = [sys.executable, str(SENDERS), way, str(N_BYTES), *map(str, rates)]
    added = {"LD_PRELOAD": str(shims / hosts.RATE_SHIM)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=os.environ | added
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == len(rates)
    return [(float(seconds), int(n_bytes)) for seconds, n_bytes in lines]


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["send", "sendto", "sendmsg", "sendmmsg", "write", "writev"])
def test_each_function_that_sends_is_counted_and_limited(shims, way):
    check_rate(shims, way, n_connections=1)


def test_a_socket_that_does_not_block_finds_its_edges(shims):
    check_rate(shims, "edges", n_connections=1)


def test_a_process_sends_at_its_rate_while_it_receives(shims):
    check_rate(shims, "both", n_connections=1)


def test_connections_share_the_rate(shims):
    check_rate(shims, "two", n_connections=2)


def check_rate(shims, way, n_connections):
    """Never above the rate. Sends go on at it, if the machine has time for them.

    Half of the rate, in the best of three trials, shows that no wake-up is lost.
    """
    limited, unlimited, *again = send(shims, way, RATE, 0, RATE, RATE)
    wanted = n_connections * N_BYTES / RATE
    trials = [limited, *again]
    assert {n_bytes for _, n_bytes in [*trials, unlimited]} == {n_connections * N_BYTES}
    fastest = min(seconds for seconds, _ in trials)
    assert wanted <= fastest < 2 * wanted, (trials, wanted)
    assert unlimited[0] < wanted


def test_only_tcp_is_counted_and_limited(shims):
    ((seconds, n_bytes),) = send(shims, "elsewhere", 1e3)
    assert n_bytes == 0 and seconds < 5.0


@pytest.mark.thorough
@pytest.mark.multiprocess
def test_collectives_between_nodes_take_the_time_of_their_bytes(shims):
    """On CPUs: the measurement itself, without GPUs. Gloo may take twice as long as it must.

    Its thread does not always receive while it has something to send; nor has it always a core.
    """
    host = Host(environment={"LD_PRELOAD": str(shims / hosts.RATE_SHIM)})
    target = "network_checks:measure_collectives"
    logs = run_processes(2, target, n_local_devices=2, hosts=[host, host])
    rows = network_checks.rows_of(logs)
    assert {row.call for row in rows} == {"dispatch", "combine", "round trip"}
    network_checks.check(rows)
    for row in rows:
        if row.rate:
            assert min(row.seconds) < 5 * row.planned_bytes / row.rate, row


# --- the plan -------------------------------------------------------------------------------


RAILS = functools.partial(rail_traffic.Rails, n_experts=16, hidden_size=64, token_bytes=96)


@pytest.mark.parametrize(("n_nodes", "n_ranks_per_node"), [(2, 2), (4, 2), (8, 1)])
@pytest.mark.parametrize("n_tokens", [5, 40, 1030])
def test_a_rank_sends_each_token_once_to_each_node_that_has_an_expert(
    n_nodes, n_ranks_per_node, n_tokens
):
    """Counted by going through choices one by one; some are none."""
    rails = RAILS(n_nodes, n_ranks_per_node, top_k=3)
    n_ranks = n_nodes * n_ranks_per_node
    ids = np.random.default_rng(n_tokens).integers(-1, 16, (n_ranks, n_tokens, 3))
    journeys = set()  # (rank, token, node)
    for (rank, token, _), expert in np.ndenumerate(ids):
        node = expert * n_nodes // 16
        if expert >= 0 and node != rank // n_ranks_per_node:
            journeys.add((rank, token, node))
    for rank in range(n_ranks):
        home, index = divmod(rank, n_ranks_per_node)
        n_sent = sum(source == rank for source, _, _ in journeys)
        n_sums = sum(
            source % n_ranks_per_node == index and node == home for source, _, node in journeys
        )
        # 24 bytes of choices for each token and other node, and what pads tiles to 128 bytes.
        dispatched, combined = rails.dispatch(ids, rank), rails.combine(ids, rank)
        padding = dispatched.n_bytes - 96 * n_sent - (n_nodes - 1) * 24 * n_tokens
        assert 0 <= padding < 128 * dispatched.n_tiles
        assert combined.n_bytes == 128 * n_sums


def test_means_are_those_of_random_choices():
    rails = rail_traffic.Rails(4, 2, 32, 4, 64, 128)
    scores = np.random.default_rng(1).random((8, 2000, 32))
    ids = np.argpartition(scores, 4)[..., :4]
    of_dispatch, of_combine = rails.expected(2000)
    dispatched = [rails.dispatch(ids, rank) for rank in range(8)]
    assert np.mean([each.n_bytes for each in dispatched]) == pytest.approx(
        of_dispatch.n_bytes, rel=0.01
    )
    assert {each.n_tiles for each in dispatched} == {of_dispatch.n_tiles}
    combined = np.mean([rails.combine(ids, rank).n_bytes for rank in range(8)])
    assert combined == pytest.approx(of_combine.n_bytes, rel=0.01)
    n_ranks = np.mean([len(set(choices // 4)) for choices in ids.reshape(-1, 4)])
    assert rails.ranks() == pytest.approx(n_ranks, rel=0.01)


def test_the_documentation_has_the_predictions():
    page = pathlib.Path(__file__).parents[2] / "docs" / "dev" / "scale.md"
    assert rail_traffic.model() in page.read_text()
