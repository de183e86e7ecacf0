"""Runs files of the suite in processes that are several nodes."""

import re
from collections.abc import Sequence

from processes import Host, run_pytest, visible_gpus

TIMEOUT_S = 300.0


def gpus_of(n_processes: int) -> list[str]:
    """A GPU for each process; consecutive ones share it if there are too few."""
    gpus = visible_gpus()
    return [gpus[i * len(gpus) // n_processes] for i in range(n_processes)]


def check_files(
    transport: str,
    n_processes: int,
    names: Sequence[str],
    n_least: int,
    *,
    n_nodes: int = 2,
    hosts: Sequence[Host] | None = None,
    overlaps: bool = False,
) -> list[str]:
    """Requires that at least `n_least` tests of the files pass and none fails; returns the logs.

    With `overlaps`, exchanges of `nvshmem` overlap with calls of any number of tokens.
    """
    logs = run_pytest(
        n_processes,
        [f"test_{name}.py" for name in names],
        "--gpu",
        f"--transports={transport}",
        f"--n-nodes={n_nodes}",
        *(["--min-overlapped-tokens=1"] if overlaps else []),
        "-m",
        "not xla_collectives and not multiprocess",
        "-k",
        "not skip_a2a and not both",  # where there is one node
        gpus=gpus_of(n_processes),
        hosts=hosts,
        timeout_s=TIMEOUT_S,
    )
    assert int(re.search(r"=+ (\d+) passed", logs[0]).group(1)) >= n_least
    return logs
