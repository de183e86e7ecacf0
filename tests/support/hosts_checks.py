"""Checks that run in a job on several hosts; `hosts.py` says how one machine has several.

Each `check_*` is a target of `processes.run_processes`; `test_hosts.py` starts them. Two nodes.
"""

import socket

import jax

import cases
import closed_forms
import harness
import jax_ep
import suite
from harness import AXIS, config_of, make_mesh
from jax_ep.nodes.connection import P2pByNodes
from jax_ep.processes.exchange import Exchange
from nvshmem_checks import check_a_captured_call_that_fails, check_captured_calls, check_replicas
from nvshmem_groups import free_heaps, small


def check_names() -> None:
    """Each process has a host name of its own. The platform's collectives connect them."""
    mesh = make_mesh(len(jax.devices()))
    own = socket.gethostname()
    others = Exchange.over(mesh, "names", 60.0)("name", own.encode())
    assert len(set(others)) == jax.process_count(), others
    suite.check(small(), "xla", mesh)


def check_collectives() -> None:
    """`p2p` inside each node, although it could serve all; XLA's collectives between them."""
    with harness.each_node_by_itself():
        config = config_of(small(), timeout_s=31.0)
        with jax_ep.ep_init(make_mesh(len(jax.devices())), AXIS, config, "p2p") as group:
            assert type(group._connection) is P2pByNodes
        check_results("p2p")


def check_network() -> None:
    """NVSHMEM maps no peer of another host; a heap serves again once all has been delivered."""
    config = config_of(small(), timeout_s=31.0)
    heaps = []
    for _ in range(2):
        with jax_ep.ep_init(make_mesh(len(jax.devices())), AXIS, config, "nvshmem") as group:
            assert group.transport == "nvshmem"
            assert free_heaps(group) == []
        heaps += free_heaps(group)
    assert len(heaps) == 2
    assert heaps[0] == heaps[1]
    check_results("nvshmem")
    check_replicas()
    check_captured_calls()
    check_a_captured_call_that_fails()


def check_results(transport: str) -> None:
    """Every routing, dtypes, formats, rows of any length, gradients, rings that are used again."""
    case, mesh = small(), make_mesh(len(jax.devices()))
    for each in cases.every_routing(case):
        suite.check(each, transport, mesh)
    several = (
        case.replace(weights="row", routing="duplicates"),
        case.replace(weights="none", token_dtype="float32", combine_dtype="float32"),
        case.replace(fused_shared_expert=True),
        case.replace(n_tokens=1),
        case.replace(max_tokens=5, hidden_size=8192),
        case.replace(token_format="blockwise_fp8", hidden_size=256),
        case.replace(max_tokens=3000, hidden_size=1024, routing="zipf"),
    )
    for each in several:
        suite.check(each, transport, mesh)
    closed_forms.check_closed_forms(case.replace(weights="row"), transport)
