"""A `jax.distributed` job of pytest processes: who takes part, and what ends all of them.

Every process runs the same tests in step, so most failures are the same everywhere, and the job
goes on. A process whose test fails alone leaves the others waiting in a collective; they end if
they make no progress for `GRACE_S`. If a process dies, JAX's runtime ends the others after
`HEARTBEAT_S`.
"""

import dataclasses
import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import jax
import pytest

from jax_ep._jax_compat import distributed_client

GRACE_S = 20.0
HEARTBEAT_S = 30
_POLL_S = 1.0
_KEY = "jax_ep_tests/failure"

# Launchers that set a process's position in the job: JAX's name of each; the variables of the
# number of processes and of the index.
LAUNCHERS = {
    "slurm": ("slurm", "SLURM_NTASKS", "SLURM_PROCID"),
    "openmpi": ("ompi", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
}


@dataclasses.dataclass(frozen=True)
class Job:
    """This process's position in a job."""

    n_processes: int
    process_id: int
    coordinator: str | None = None  # host:port; None: JAX asks the launcher
    launcher: str = "flags"

    @classmethod
    def read(cls, option: Any, environ: Mapping[str, str]) -> "Job":
        """From the flags or, with --launcher, from the variables that it sets."""
        if option.launcher is None:
            return cls(option.n_processes, option.process_id, option.coordinator)
        if option.launcher not in LAUNCHERS:
            known = ", ".join(LAUNCHERS)
            raise pytest.UsageError(f"--launcher must be one of {known}; got {option.launcher}")
        _, *names = LAUNCHERS[option.launcher]
        missing = [name for name in names if name not in environ]
        if missing:
            raise pytest.UsageError(
                f"--launcher={option.launcher} needs {' and '.join(missing)} in the environment. "
                "Was pytest started by the launcher?"
            )
        n_processes, process_id = (int(environ[name]) for name in names)
        return cls(n_processes, process_id, option.coordinator, option.launcher)

    def join(self) -> None:
        """Joins the job; with one process and no coordinator, there is none."""
        if self.coordinator:
            position = (self.coordinator, self.n_processes, self.process_id)
            jax.distributed.initialize(*position, heartbeat_timeout_seconds=HEARTBEAT_S)
        elif self.launcher != "flags":
            method = LAUNCHERS[self.launcher][0]
            jax.distributed.initialize(
                cluster_detection_method=method, heartbeat_timeout_seconds=HEARTBEAT_S
            )

    def __str__(self) -> str:
        return f"process {self.process_id} of {self.n_processes} on {socket.gethostname()}"


class Watch:
    """A pytest plugin: names this process in reports, and ends it if another's failure stops it."""

    def __init__(self, job: Job, config: pytest.Config) -> None:
        self.job = job
        self._capture: Any = config.pluginmanager.getplugin("capturemanager")
        self._client = distributed_client()
        self._step, self._since = "the start", time.monotonic()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._end_if_stuck, daemon=True)
        self._thread.start()

    def pytest_report_header(self) -> str:
        """The first lines of the log."""
        return f"job: {self.job}, launched by {self.job.launcher}"

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins, so there is progress."""
        self._step, self._since = nodeid, time.monotonic()

    def pytest_sessionfinish(self) -> None:
        """No test is left that could wait for another process."""
        self._has_ended.set()
        self._thread.join()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        """Says in which process a test has failed, here and to the other processes."""
        report = yield
        if report.failed:
            report.sections.append(("job", f"failed in {self.job}"))
            message = f"{self.job}: {report.nodeid}"
            self._client.key_value_set(_KEY, message, allow_overwrite=True)
        return report

    def _end_if_stuck(self) -> None:
        failure = None
        while not self._has_ended.wait(timeout=_POLL_S):
            failure = failure or self._failure()
            stuck_s = time.monotonic() - self._since
            if failure and stuck_s > GRACE_S:
                with self._capture.global_and_fixture_disabled():
                    print(
                        f"\n{self.job}: no progress in {self._step} for {stuck_s:.0f} s, after a "
                        f"failure in {failure}",
                        flush=True,
                    )
                os._exit(1)

    def _failure(self) -> str | None:
        """The last failure in any process."""
        try:
            return self._client.blocking_key_value_get(_KEY, 1)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error) or "NOT_FOUND" in str(error):
                return None
            return f"the job: {error}"
