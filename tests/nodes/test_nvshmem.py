"""Transport `nvshmem`: several processes of one host as two or four nodes.

Processes may share a GPU; then they take turns. On one host, kernels store straight to their peers;
`check_puts` has them leave all of that to NVSHMEM. test_hosts.py has a network between them.
"""

import pathlib
import shutil
import subprocess
import tempfile

import pytest

from node_files import TIMEOUT_S, check_files, gpus_of
from processes import run_processes, visible_gpus


@pytest.fixture
def mps(monkeypatch):
    """Processes that start meanwhile run kernels on a GPU at the same time."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        pytest.skip("needs nvidia-cuda-mps-control")
    with tempfile.TemporaryDirectory() as folder:  # of a short name, as sockets need
        for name in ("PIPE", "LOG"):
            path = pathlib.Path(folder, name)
            path.mkdir()
            monkeypatch.setenv(f"CUDA_MPS_{name}_DIRECTORY", str(path))
        with monkeypatch.context() as patch:
            patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # clients have their own
            started = subprocess.run(
                [control, "-d"], capture_output=True, text=True, timeout=60, check=False
            )
        if started.returncode != 0:
            pytest.skip(f"MPS does not start: {started.stdout}{started.stderr}")
        try:
            yield
        finally:
            subprocess.run([control], input="quit -t 5\n", text=True, timeout=60, check=False)


# By the module that has them.
CHECKS = {
    "nvshmem_checks": [
        "check_groups",
        "check_puts",
        "check_overlap",
        "check_a_skipped_call",
        "check_a_skipped_dispatch",
        "check_a_skipped_combine",
        "check_a_skipped_backward",
        "check_a_changed_handle",
        "check_a_process_that_exits",
    ],
    "nvshmem_async_checks": [
        "check_async",
        "check_a_skipped_asynchronous_call",
        "check_a_skipped_asynchronous_dispatch",
        "check_a_skipped_asynchronous_combine",
        "check_a_skipped_unreduced_combine",
    ],
}


@pytest.mark.parametrize("n_processes", [2, 4])
@pytest.mark.parametrize(
    "target", [f"{module}:{check}" for module, checks in CHECKS.items() for check in checks]
)
@pytest.mark.gpu
@pytest.mark.multiprocess
def test_jobs(target, n_processes):
    run_processes(n_processes, target, gpus=gpus_of(n_processes), timeout_s=TIMEOUT_S)


FILES = ["nodes", "async", "overlap", "independent_calls", "redispatch", "call_sizes"]


@pytest.mark.parametrize(
    ("n_processes", "n_nodes", "files", "least", "overlaps"),
    [
        (2, 2, ["nodes"], 6, False),
        (2, 2, ["nodes"], 6, True),
        (4, 2, FILES, 100, False),
        (4, 2, FILES, 100, True),
        (4, 4, ["independent_calls", "async", "overlap"], 23, False),
        (4, 4, ["independent_calls", "async", "overlap"], 23, True),
    ],
)
@pytest.mark.gpu
@pytest.mark.multiprocess
def test_files_of_the_suite(n_processes, n_nodes, files, least, overlaps):
    check_files("nvshmem", n_processes, files, least, n_nodes=n_nodes, overlaps=overlaps)


@pytest.mark.parametrize(("n_processes", "check"), [(2, "check_sharing"), (4, "check_refusal")])
@pytest.mark.usefixtures("mps")
@pytest.mark.gpu
@pytest.mark.multiprocess
def test_processes_that_share_a_gpu_by_mps(n_processes, check):
    """Two nodes' kernels fit on it together; those of more processes are refused."""
    gpus = visible_gpus()[:1] * n_processes
    run_processes(n_processes, f"nvshmem_checks:{check}", gpus=gpus, timeout_s=TIMEOUT_S)
