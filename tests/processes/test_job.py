"""Jobs of pytest processes: launchers, names in reports, and the end of all when one fails."""

import argparse
import pathlib
import random
import re
import sys
import time

import pytest

import job
import processes
from processes import reserved_port, run_commands

SAMPLES = pathlib.Path(__file__).parents[1] / "support" / "job_samples.py"


def options(**given) -> argparse.Namespace:
    defaults = {"launcher": None, "n_processes": 1, "process_id": 0, "coordinator": None}
    return argparse.Namespace(**(defaults | given))


def test_flags_say_who_takes_part():
    found = job.Job.read(options(n_processes=2, process_id=1, coordinator="a:1"), {})
    assert found == job.Job(2, 1, "a:1")


@pytest.mark.parametrize("launcher", job.LAUNCHERS)
def test_launchers_say_who_takes_part(launcher):
    _, *names = job.LAUNCHERS[launcher]
    found = job.Job.read(options(launcher=launcher), dict(zip(names, ("8", "5"), strict=True)))
    assert (found.n_processes, found.process_id, found.coordinator) == (8, 5, None)
    assert str(found).startswith("process 5 of 8 on ")


@pytest.mark.parametrize("launcher", job.LAUNCHERS)
def test_a_launcher_that_has_not_started_pytest_is_an_error(launcher):
    with pytest.raises(pytest.UsageError, match="Was pytest started by the launcher?"):
        job.Job.read(options(launcher=launcher), {})


def test_an_unknown_launcher_is_an_error():
    with pytest.raises(pytest.UsageError, match="must be one of slurm, openmpi; got lsf"):
        job.Job.read(options(launcher="lsf"), {})


def environments(launcher: str, n: int) -> list[dict[str, str]]:
    """The variables that the launcher sets in each of n processes on this machine."""
    number = str(random.randrange(1, 1 << 20))
    if launcher == "slurm":
        return [
            {
                "SLURM_JOB_ID": number,
                "SLURM_STEP_NODELIST": "localhost",
                "SLURM_NTASKS": str(n),
                "SLURM_PROCID": str(i),
                "SLURM_LOCALID": str(i),
            }
            for i in range(n)
        ]
    return [
        {
            "OMPI_MCA_orte_hnp_uri": f"{number}.0;tcp://127.0.0.1:34911",
            "OMPI_COMM_WORLD_SIZE": str(n),
            "OMPI_COMM_WORLD_RANK": str(i),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(i),
        }
        for i in range(n)
    ]


def run(
    which: str, *flags: str, positions: list[dict[str, str]], timeout_s: float = 120
) -> list[str]:
    """Runs one of the samples in a process for each of `positions`."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", str(SAMPLES)]
    command += ["--n-devices=4", "-k", which, *flags]
    added = [position | {"JAX_EP_TEST_WANTED": str(len(positions))} for position in positions]
    return run_commands([command] * len(positions), " passed", timeout_s, added)


@pytest.mark.thorough
@pytest.mark.multiprocess
@pytest.mark.parametrize("launcher", job.LAUNCHERS)
def test_a_launchers_processes_join_one_job(launcher):
    logs = run("passes", f"--launcher={launcher}", positions=environments(launcher, 2))
    for i, log in enumerate(logs):
        assert f"job: process {i} of 2 on " in log
        assert f"launched by {launcher}" in log


def run_by_flags(which: str) -> str:
    """The text of the failure of a job of two processes."""
    with reserved_port() as port:
        names = ("COORDINATOR", "N_PROCESSES", "PROCESS_ID")
        values = [(f"localhost:{port}", "2", str(i)) for i in range(2)]
        positions = [
            {f"JAX_EP_TEST_{name}": value for name, value in zip(names, each, strict=True)}
            for each in values
        ]
        with pytest.raises(AssertionError) as caught:
            run(which, positions=positions)
    return str(caught.value)


@pytest.mark.thorough
@pytest.mark.multiprocess
def test_reports_name_the_process():
    text = run_by_flags("fails_everywhere")
    for i in range(2):
        assert f"failed in process {i} of 2 on " in text
    assert "no progress" not in text


@pytest.mark.thorough
@pytest.mark.multiprocess
def test_a_test_that_fails_in_one_process_ends_all(monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 100.0)  # the job must end by itself
    begin = time.monotonic()
    text = run_by_flags("fails_alone")
    assert time.monotonic() - begin < 90
    assert re.search(r"no progress in \S+test_fails_alone for 2\d s, after .*process 1 of 2", text)


@pytest.mark.thorough
@pytest.mark.multiprocess
def test_a_process_that_dies_ends_all(monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 100.0)
    begin = time.monotonic()
    text = run_by_flags("dies")
    assert time.monotonic() - begin < 110
    assert "process 1 of 2 ended with status 3" in text
    assert "process 0 of 2 ended with status" in text
    assert "was killed" not in text
