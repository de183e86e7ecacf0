"""Transport `p2p` with ranks in several processes: the suite, and ranks that fail.

Several processes may share a GPU, so one GPU suffices for most tests. (XLA's own collectives refuse
that, but nothing here uses them.)
"""

import pytest

from processes import run_processes, run_pytest, visible_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.multiprocess]
TIMEOUT_S = 300.0
CHECKS = [
    "check_the_suite",
    "check_a_skipped_call",
    "check_a_skipped_graph",
    "check_a_process_that_exits",
]


def needs_gpus(n: int) -> list[str]:
    gpus = visible_gpus()
    if len(gpus) < n:
        pytest.skip(f"needs {n} GPUs, found {len(gpus)}")
    return gpus[:n]


def run(target: str, gpus: list[str]) -> None:
    """Runs a function of `process_checks` in a process for each entry of `gpus`."""
    run_processes(len(gpus), f"process_checks:{target}", gpus=gpus, timeout_s=TIMEOUT_S)


def run_files(names: list[str], n_processes: int, *options: str) -> None:
    """Runs files of the suite in processes that are spread over all GPUs."""
    needs_gpus(1)
    gpus = visible_gpus()
    logs = run_pytest(
        n_processes,
        [f"test_{name}.py" for name in names],
        "--gpu",
        "--transports=p2p",
        *options,
        gpus=[gpus[i % len(gpus)] for i in range(n_processes)],
        timeout_s=TIMEOUT_S,
    )
    print(logs[0])


@pytest.mark.parametrize("n_processes", [2, 4, 8])
@pytest.mark.parametrize("check", CHECKS)
def test_processes_share_a_gpu(check, n_processes):
    run(check, needs_gpus(1) * n_processes)


@pytest.mark.multigpu
@pytest.mark.parametrize("n_processes", [4, 8])
@pytest.mark.parametrize("check", CHECKS)
def test_processes_share_two_gpus(check, n_processes):
    """Some peers are on the same GPU, others across the link."""
    run(check, needs_gpus(2) * (n_processes // 2))


@pytest.mark.parametrize("n_processes", [4, 8])
@pytest.mark.parametrize(
    "files",
    [
        ["dispatch_combine", "shared_expert", "shared_memory"],
        ["grad", "transforms", "independent_calls", "async", "overlap"],
        ["quantized", "quantized_grad", "quantized_transforms"],
        ["input_forms", "axes", "unused_rows", "choices"],
        ["call_sizes", "row_alignment", "redispatch", "quantized_tokens"],
    ],
    ids="-".join,
)
def test_files_of_the_suite_run_in_several_processes(files, n_processes):
    """A single process would need a GPU per rank: four for most tests, eight for some."""
    run_files(files, n_processes, "-m", "not xla_collectives")


def test_files_with_four_ranks_run_in_four_processes():
    """Here, no test has eight."""
    run_files(["moe"], 4, "-m", "not xla_collectives")


@pytest.mark.slow
@pytest.mark.parametrize("n_processes", [2, 4, 8])
def test_random_cases_in_several_processes(n_processes, request):
    """As many cases as --random-cases says, for each number of processes."""
    option = request.config.option
    cases = (f"--random-cases={option.random_cases}", f"--random-seed={option.random_seed}")
    run_files(["random_cases"], n_processes, *cases)


@pytest.mark.multigpu
@pytest.mark.parametrize("n_processes", [2, 4, 8])
@pytest.mark.parametrize("check", CHECKS)
def test_each_process_has_a_gpu(check, n_processes):
    run(check, needs_gpus(n_processes))


# Not where processes share a GPU: NCCL, which refuses that, gathers the counts of drops and carries
# copies of weights.
@pytest.mark.multigpu
@pytest.mark.parametrize("n_processes", [2, 4, 8])
@pytest.mark.parametrize(
    "target",
    [
        pytest.param("test_drops:check_every_process_raises", id="drops_raise"),
        pytest.param("test_placement:check_every_process", id="placements"),
    ],
)
def test_collectives_of_xla_beside_calls(target, n_processes):
    gpus = needs_gpus(n_processes)
    run_processes(n_processes, target, gpus=gpus, timeout_s=TIMEOUT_S)


@pytest.mark.multigpu
@pytest.mark.parametrize("check", [*CHECKS, "check_two_axes"])
def test_each_process_has_two_gpus(check):
    gpus = needs_gpus(4)
    run(check, [",".join(gpus[:2]), ",".join(gpus[2:])])


def test_groups_may_span_processes_or_not():
    run("check_two_axes", needs_gpus(1) * 4)


@pytest.mark.multigpu
def test_a_skipped_call_fails_in_one_process():
    """In a new process, so that this one need not start CUDA."""
    n_gpus = len(visible_gpus())
    gpus = needs_gpus(4 if n_gpus >= 4 else 2)
    run("check_a_skipped_call", [",".join(gpus)])
