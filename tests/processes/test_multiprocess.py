"""The suite in jobs of several processes on CPUs."""

import re
import time

import jax
import numpy as np
import pytest

import cases
import jax_ep
import processes
import suite
from harness import AXIS, config_of, make_mesh
from processes import run_processes, run_pytest

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize(
    ("n_processes", "n_local_devices"), [(2, 4), pytest.param(4, 1, marks=pytest.mark.thorough)]
)
def test_several_processes_match_the_oracle(n_processes, n_local_devices):
    target = "test_multiprocess:check_all_modes"
    run_processes(n_processes, target, n_local_devices=n_local_devices)


@pytest.mark.thorough
def test_groups_may_span_processes_or_not():
    run_processes(2, "test_multiprocess:check_two_axes", n_local_devices=4)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("n_processes", "n_local_devices"), [(2, 2), pytest.param(3, 1, marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize(
    "target",
    [
        pytest.param("test_drops:check_every_process_raises", id="drops_raise"),
        pytest.param("test_placement:check_every_process", id="placements"),
    ],
)
def test_collectives_of_xla_beside_calls(target, n_processes, n_local_devices):
    run_processes(n_processes, target, n_local_devices=n_local_devices)


@pytest.mark.thorough
def test_auto_selects_a_transport_for_several_processes():
    run_processes(2, "test_multiprocess:check_choice_of_transport")


def test_a_failing_process_is_reported_with_every_log(monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 1.0)
    start = time.monotonic()
    with pytest.raises(AssertionError, match="process 1 of 2 ended with status 1") as info:
        run_processes(2, "test_multiprocess:fail_in_one_process", timeout_s=60)
    assert time.monotonic() - start < 55
    assert "log of process 0" in str(info.value)
    assert "on purpose" in str(info.value)


def test_a_hanging_process_is_killed_at_the_time_limit():
    start = time.monotonic()
    with pytest.raises(AssertionError, match="not all processes ended within 6 s"):
        run_processes(2, "test_multiprocess:hang_in_one_process", timeout_s=6)
    assert time.monotonic() - start < 20


@pytest.mark.thorough
def test_the_suite_itself_runs_in_several_processes():
    """As on several hosts: the same files with the same options, all ranks in step."""
    files = ["test_config.py", "test_grad.py", "test_stats.py"]
    which = "test_config or (closed_forms and True) or count_what_was_sent"
    for log in run_pytest(2, files, "--n-devices=4", "-k", which):
        assert int(re.search(r"=+ (\d+) passed", log).group(1)) > 60
        assert "for one process only" in log


def check_all_modes() -> None:
    """Every routing and every mode, on a mesh of all devices."""
    n_ranks = len(jax.devices())
    mesh = make_mesh(n_ranks)
    small = cases.SMALL[n_ranks]
    for case in cases.every_routing(small):
        suite.check(case, "xla", mesh)
    for weights in ("none", "row"):
        suite.check(small.replace(weights=weights, routing="duplicates"), "xla", mesh)
        suite.check(small.replace(weights=weights, n_nodes=2), "xla", mesh)
    suite.check(small.replace(expert_copies=3, routing="zipf"), "xla", mesh)
    for name in ("blockwise_fp8", "nvfp4"):
        suite.check(small.replace(token_format=name, hidden_size=128), "xla", mesh)


def check_two_axes() -> None:
    """Replicas inside one process each, which `host` serves, and replicas that span both."""
    inside = make_mesh(4, dp=2)
    across = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2).T, inside.axis_names)
    case = cases.SMALL[4].replace(routing="zipf")
    for mesh, fastest in ((inside, "host"), (across, "xla")):
        with jax_ep.ep_init(mesh, AXIS, config_of(case)) as group:
            assert group.transport == fastest
        for transport in sorted({"xla", fastest}):
            suite.check(case, transport, mesh)


def check_choice_of_transport() -> None:
    """`auto` is `xla` for several processes; `host` says that it cannot serve them."""
    mesh = make_mesh(2)
    config = config_of(cases.SMALL[2])
    assert jax_ep.ep_init(mesh, AXIS, config).transport == "xla"
    with pytest.raises(ValueError, match="process"):
        jax_ep.ep_init(mesh, AXIS, config, transport="host")


def fail_in_one_process() -> None:
    """Process 1 fails early; the others would wait for it."""
    if jax.process_index() == 1:
        raise RuntimeError("on purpose")
    time.sleep(600)


def hang_in_one_process() -> None:
    """Process 1 does not end."""
    if jax.process_index() == 1:
        time.sleep(600)
