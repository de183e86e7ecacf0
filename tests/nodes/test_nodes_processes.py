"""Several nodes, which are processes of a job: one each, or several."""

import re

import jax
import numpy as np
import pytest

import cases
import closed_forms
import jax_ep
import suite
from harness import AXIS, config_of, make_mesh, n_replicas
from jax_ep.nodes.connection import NodesConnection
from node_groups import FOUR, SHARED, TWO
from processes import run_processes, run_pytest

pytestmark = pytest.mark.multiprocess


@pytest.mark.thorough
def test_files_of_the_suite_run_on_two_nodes_of_a_process_each():
    """`host` in each process, XLA's collectives between them; all cases on all devices."""
    names = ["dispatch_combine", "sums", "transforms", "async", "independent_calls"]
    logs = run_pytest(
        2,
        [f"test_{name}.py" for name in names],
        "--transports=host",
        "--n-devices=4",
        "--n-nodes=2",
        "-k",
        "not default_capacity",  # it has configs of its own, without nodes
        timeout_s=400,
    )
    assert int(re.search(r"=+ (\d+) passed", logs[0]).group(1)) > 60


@pytest.mark.thorough
@pytest.mark.parametrize("n_local_devices", [1, 2])
def test_four_nodes_of_a_process_each(n_local_devices):
    target = "test_nodes_processes:check_a_node_per_process"
    run_processes(4, target, n_local_devices=n_local_devices, timeout_s=300)


def check_a_node_per_process() -> None:
    """Every routing, every mode, a format that pads groups, and gradients."""
    n_ranks, n_nodes = len(jax.devices()), jax.process_count()
    mesh = make_mesh(n_ranks)
    small = cases.SMALL[n_ranks].replace(n_nodes=n_nodes)
    with jax_ep.ep_init(mesh, AXIS, config_of(small)) as group:
        assert group.transport == "host"
        assert isinstance(group._connection, NodesConnection)
    for case in cases.every_routing(small):
        suite.check(case, "host", mesh)
    for weights in ("none", "row"):
        suite.check(small.replace(weights=weights, routing="duplicates", **SHARED), "host", mesh)
    for name in ("blockwise_fp8", "nvfp4"):
        suite.check(small.replace(token_format=name, recv_capacity=40), "host", mesh)
    suite.check(small.replace(expert_copies=2, routing="zipf"), "host", mesh)
    closed_forms.check_closed_forms(small.replace(weights="row", **SHARED), "host")


@pytest.mark.thorough
def test_a_process_may_have_several_nodes():
    run_processes(2, "test_nodes_processes:check_nodes_of_processes", n_local_devices=4)


def check_nodes_of_processes() -> None:
    """Four nodes in two processes; two axes; what `auto` and `host` do without nodes."""
    mesh = make_mesh(8)
    for case in (FOUR, FOUR.replace(weights="row", **SHARED), FOUR.replace(n_nodes=2)):
        with jax_ep.ep_init(mesh, AXIS, config_of(case)) as group:
            assert group.transport == "host"
            assert isinstance(group._connection, NodesConnection)
        suite.check(case, "host", mesh)
        closed_forms.check_closed_forms(case, "host")
    across = jax.sharding.Mesh(
        np.array(jax.devices()).reshape(2, 2, 2).transpose(1, 0, 2).reshape(2, 4), ("dp", AXIS)
    )
    assert n_replicas(across) == 2
    suite.check(TWO.replace(routing="zipf"), "host", across)
    assert jax_ep.ep_init(mesh, AXIS, config_of(cases.SMALL[8])).transport == "xla"
    with pytest.raises(
        ValueError, match="all devices along the axis 'ep' must belong to one process"
    ):
        jax_ep.ep_init(mesh, AXIS, config_of(FOUR, n_nodes=1), "host")
    odd = jax.sharding.Mesh(np.array(jax.devices())[[0, 4, 1, 5, 2, 6, 3, 7]], (AXIS,))
    with pytest.raises(ValueError, match="all devices of a node, 4 consecutive ranks along"):
        jax_ep.ep_init(odd, AXIS, config_of(FOUR, n_nodes=2), "host")
