"""Transport `nvshmem`: several processes of one host as two or four nodes.

Processes may share a GPU; then they take turns. On one host, kernels store straight to their peers;
`check_puts` has them leave all of that to NVSHMEM. test_hosts.py has a network between them.
"""

import re

import pytest

from processes import run_processes, run_pytest, visible_gpus

TIMEOUT_S = 300.0


def gpus_of(n_processes: int) -> list[str]:
    """A GPU for each process; consecutive ones share it if there are too few."""
    gpus = visible_gpus()
    return [gpus[i * len(gpus) // n_processes] for i in range(n_processes)]


@pytest.mark.parametrize("n_processes", [2, 4])
@pytest.mark.parametrize(
    "check", ["check_groups", "check_puts", "check_a_skipped_call", "check_a_process_that_exits"]
)
@pytest.mark.gpu
@pytest.mark.multiprocess
def test_jobs(check, n_processes):
    target = f"nvshmem_checks:{check}"
    run_processes(n_processes, target, gpus=gpus_of(n_processes), timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(
    ("n_processes", "n_nodes", "files", "n_passed"),
    [
        (2, 2, ["nodes"], 6),
        (4, 2, ["nodes", "async", "independent_calls", "redispatch", "call_sizes"], 100),
        (4, 4, ["independent_calls", "async"], 9),
    ],
)
@pytest.mark.gpu
@pytest.mark.multiprocess
def test_files_of_the_suite(n_processes, n_nodes, files, n_passed):
    logs = run_pytest(
        n_processes,
        [f"test_{name}.py" for name in files],
        "--gpu",
        "--transports=nvshmem",
        f"--n-nodes={n_nodes}",
        "-m",
        "not xla_collectives and not multiprocess",
        "-k",
        "not skip_a2a and not both",  # where there is one node
        gpus=gpus_of(n_processes),
        timeout_s=TIMEOUT_S,
    )
    assert int(re.search(r"=+ (\d+) passed", logs[0]).group(1)) >= n_passed
