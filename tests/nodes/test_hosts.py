"""Nodes on different hosts: processes of this machine, told that they are on several.

So NCCL connects the nodes by sockets, and NVSHMEM by UCX over TCP: no node reaches the memory of
another, and messages take their time. Processes may share a GPU; then they take turns.

UCX and what NVSHMEM needs with it are no part of the environment of the tests: without
JAX_EP_TEST_UCX, the folder of UCX's libraries, the tests of transport `nvshmem` are skipped.
"""

import subprocess
import sys

import pytest

import hosts
import network_checks
from node_files import TIMEOUT_S, check_files, gpus_of
from processes import child_environment, run_processes

HEAP_BYTES = 1 << 30
SUITE = [(2, ["nodes"], 6), (4, ["async", "independent_calls", "call_sizes"], 30)]


@pytest.fixture(scope="module")
def shims(tmp_path_factory):
    """The folder of what NVSHMEM's hosts load; skips the test if they cannot be set up."""
    reason = hosts.why_no_nvshmem(4 * HEAP_BYTES)
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("shims")
    hosts.build_shims(folder)
    yield folder
    for heap in hosts.heaps():
        heap.unlink()


@pytest.fixture
def host_names():
    """Skips the test if processes cannot have host names of their own."""
    reason = hosts.why_no_names()
    if reason:
        pytest.skip(reason)


@pytest.mark.thorough
@pytest.mark.usefixtures("host_names")
@pytest.mark.multiprocess
def test_processes_have_host_names_of_their_own():
    """On CPUs, too: gloo finds the hosts by their names."""
    run_processes(2, "hosts_checks:check_names", hosts=hosts.by_name(2, 2))


@pytest.mark.usefixtures("host_names")
def test_hosts_have_heaps_of_their_own(tmp_path):
    """Without NVSHMEM: what it would open, under the name that it would use."""
    hosts.build_shims(tmp_path)
    create = (
        "import ctypes, os; libc = ctypes.CDLL(None)\n"
        "assert libc.shm_open(b'sysmem_symm_heap', os.O_CREAT | os.O_EXCL, 0o600) >= 0"
    )
    for host in hosts.for_nvshmem(2, 2, shims=tmp_path, heap_bytes=0):
        command = [*host.launcher, sys.executable, "-c", create]
        subprocess.run(command, check=True, env=child_environment() | host.environment)
    found = hosts.heaps()
    for heap in found:
        heap.unlink()
    assert [heap.name for heap in found] == [f"sysmem_symm_heap.{name}" for name in hosts.names(2)]


def test_what_the_hosts_lack_is_said(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_EP_TEST_UCX", raising=False)
    assert "JAX_EP_TEST_UCX" in hosts.why_no_nvshmem(0)
    monkeypatch.setenv("JAX_EP_TEST_UCX", str(tmp_path))
    assert "lacks libucp.so.0, libuct.so.0" in hosts.why_no_nvshmem(0)
    (tmp_path / "ucx").mkdir()
    for name in hosts.UCX_LIBRARIES:
        (tmp_path / name).touch()
    assert "MiB of shared memory" in hosts.why_no_nvshmem(1 << 60)


@pytest.mark.parametrize("n_processes", [2, 4])
@pytest.mark.gpu
@pytest.mark.multiprocess
def test_xla_connects_hosts(n_processes):
    logs = run_processes(
        n_processes,
        "hosts_checks:check_collectives",
        gpus=gpus_of(n_processes),
        hosts=hosts.for_nccl(n_processes, 2),
        timeout_s=TIMEOUT_S,
    )
    for log in logs:
        assert "via NET/Socket" in log, log


@pytest.mark.parametrize(("n_processes", "files", "least"), SUITE)
@pytest.mark.gpu
@pytest.mark.multiprocess
def test_files_of_the_suite_with_xla_between_hosts(n_processes, files, least):
    check_files("p2p", n_processes, files, least, hosts=hosts.for_nccl(n_processes, 2))


@pytest.mark.parametrize("n_processes", [2, 4])
@pytest.mark.parametrize(
    "target", ["hosts_checks:check_network", "nvshmem_checks:check_a_skipped_call"]
)
@pytest.mark.gpu
@pytest.mark.multiprocess
def test_nvshmem_connects_hosts(target, n_processes, shims):
    run_processes(
        n_processes,
        target,
        gpus=gpus_of(n_processes),
        hosts=hosts.for_nvshmem(n_processes, 2, shims=shims, heap_bytes=HEAP_BYTES),
        timeout_s=TIMEOUT_S,
    )


@pytest.mark.parametrize(("n_processes", "files", "least"), SUITE)
@pytest.mark.gpu
@pytest.mark.multiprocess
def test_files_of_the_suite_with_nvshmem_between_hosts(n_processes, files, least, shims):
    on = hosts.for_nvshmem(n_processes, 2, shims=shims, heap_bytes=HEAP_BYTES)
    check_files("nvshmem", n_processes, files, least, hosts=on)


@pytest.mark.parametrize("n_processes", [2, 4])
@pytest.mark.gpu
@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_limited_network_carries_what_the_plan_says(n_processes, shims):
    """Processes of a node share a GPU, by MPS if that runs. Prints times and bytes."""
    logs = run_processes(
        n_processes,
        "network_checks:measure",
        gpus=gpus_of(n_processes),
        hosts=hosts.for_nvshmem(
            n_processes, 2, shims=shims, heap_bytes=HEAP_BYTES, counts_sent=True
        ),
        timeout_s=75.0,
    )
    rows = network_checks.rows_of(logs)
    print(network_checks.table(rows))
    network_checks.check(rows)
