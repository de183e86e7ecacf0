"""Transport `nvshmem`: several processes of one host as two or four nodes.

Processes may share a GPU; then they take turns. On one host, kernels store straight to their peers;
`check_puts` has them leave all of that to NVSHMEM. test_hosts.py has a network between them.
"""

import pytest

from node_files import TIMEOUT_S, check_files, gpus_of
from processes import run_processes


@pytest.mark.parametrize("n_processes", [2, 4])
@pytest.mark.parametrize(
    "check",
    [
        "check_groups",
        "check_puts",
        "check_overlap",
        "check_a_skipped_call",
        "check_a_skipped_dispatch",
        "check_a_skipped_combine",
        "check_a_changed_handle",
        "check_a_process_that_exits",
    ],
)
@pytest.mark.gpu
@pytest.mark.multiprocess
def test_jobs(check, n_processes):
    target = f"nvshmem_checks:{check}"
    run_processes(n_processes, target, gpus=gpus_of(n_processes), timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(
    ("n_processes", "n_nodes", "files", "least", "overlaps"),
    [
        (2, 2, ["nodes"], 6, False),
        (2, 2, ["nodes"], 6, True),
        (4, 2, ["nodes", "async", "independent_calls", "redispatch", "call_sizes"], 100, False),
        (4, 2, ["nodes", "async", "independent_calls", "redispatch", "call_sizes"], 100, True),
        (4, 4, ["independent_calls", "async"], 9, False),
        (4, 4, ["independent_calls", "async"], 9, True),
    ],
)
@pytest.mark.gpu
@pytest.mark.multiprocess
def test_files_of_the_suite(n_processes, n_nodes, files, least, overlaps):
    check_files("nvshmem", n_processes, files, least, n_nodes=n_nodes, overlaps=overlaps)
