"""The suite in jobs of several processes on the CPU, where `xla` is the transport."""

from __future__ import annotations

import re
import time

import jax
import numpy as np
import pytest

import cases
import jax_ep
import suite
from harness import AXIS, config_of, make_mesh
from ranks import run_pytest, run_ranks

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize(("n_processes", "n_local_devices"), [(2, 4), (4, 1)])
def test_processes_give_the_oracles_bits(n_processes, n_local_devices):
    run_ranks(
        n_processes,
        "test_multiprocess:check_all_modes",
        n_local_devices=n_local_devices,
    )


def test_groups_of_ranks_may_span_processes_or_not():
    run_ranks(2, "test_multiprocess:check_two_axes", n_local_devices=4)


def test_the_transport_fits_the_processes():
    run_ranks(2, "test_multiprocess:check_choice_of_transport")


def test_a_failing_rank_is_reported_with_every_log():
    start = time.monotonic()
    with pytest.raises(AssertionError, match="rank 1 of 2 ended with status 1") as info:
        run_ranks(2, "test_multiprocess:fail_on_one_rank", timeout_s=60)
    assert time.monotonic() - start < 55
    assert "log of rank 0" in str(info.value)
    assert "on purpose" in str(info.value)


def test_a_hanging_rank_is_killed_at_the_limit():
    start = time.monotonic()
    with pytest.raises(AssertionError, match="not all ranks ended in 15 s"):
        run_ranks(2, "test_multiprocess:hang_on_one_rank", timeout_s=15)
    assert time.monotonic() - start < 30


def test_the_suite_itself_runs_in_several_processes():
    """As on several hosts: the same files with the same options, all ranks in step."""
    files = ["test_config.py", "test_grad.py", "test_stats.py"]
    which = "knows_its_sizes or closed_forms or count_what_was_sent"
    for log in run_pytest(2, files, "--n-devices=4", "-k", which):
        assert int(re.search(r"=+ (\d+) passed", log).group(1)) > 10
        assert "of one process" in log


def check_all_modes() -> None:
    """Runs every routing, and every mode, on a mesh of all devices."""
    n_ranks = len(jax.devices())
    mesh = make_mesh(n_ranks)
    for case in cases.every_routing(cases.SMALL[n_ranks]):
        suite.check(case, "xla", mesh)
    for weights in ("none", "row"):
        case = cases.SMALL[n_ranks].but(weights=weights, routing="duplicates")
        suite.check(case, "xla", mesh)
    for name in ("blockwise_fp8", "nvfp4"):
        case = cases.SMALL[n_ranks].but(token_format=name, hidden_size=128)
        suite.check(case, "xla", mesh)


def check_two_axes() -> None:
    """Runs groups inside one process each, and groups of devices of both."""
    case = cases.SMALL[4].but(routing="zipf")
    inside = make_mesh(4, dp=2)
    suite.check(case, "xla", inside)
    across = jax.sharding.Mesh(
        np.array(jax.devices()).reshape(4, 2).T, inside.axis_names
    )
    suite.check(case, "xla", across)


def check_choice_of_transport() -> None:
    """`auto` is `xla` where several processes take part; `host` says it cannot."""
    mesh = make_mesh(2)
    config = config_of(cases.SMALL[2])
    assert jax_ep.ep_init(mesh, AXIS, config).transport == "xla"
    with pytest.raises(ValueError, match="process"):
        jax_ep.ep_init(mesh, AXIS, config, transport="host")


def fail_on_one_rank() -> None:
    """Fails in process 1, early; the others wait for it."""
    if jax.process_index() == 1:
        raise RuntimeError("on purpose")
    time.sleep(600)


def hang_on_one_rank() -> None:
    """Hangs in process 1."""
    if jax.process_index() == 1:
        time.sleep(600)
