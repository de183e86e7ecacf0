"""Runs a function in several processes of one `jax.distributed` job on the CPU.

`run_ranks` is the test's side. Run as a script, this file is one process of the job:
it joins, calls the function, and writes `SUMMARY` as its last line. A process that
ends without it has failed, whatever its exit status.
"""

from __future__ import annotations

import importlib
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import traceback

SUMMARY = "rank finished"
GRACE_S = 5.0  # for the rest, once one process has failed


def run_ranks(
    n_processes: int,
    target: str,
    *,
    n_local_devices: int = 1,
    timeout_s: float = 240.0,
) -> list[str]:
    """Calls `target` ("module:function") in every process; gives their logs.

    Raises:
        AssertionError: a process failed or was still running after `timeout_s`; the
            text holds every process's log. No process is left behind.
    """
    command = [sys.executable, __file__, target, f"localhost:{free_port()}"]
    with tempfile.TemporaryDirectory() as folder:
        logs = [pathlib.Path(folder, f"{i}.log") for i in range(n_processes)]
        processes = []
        try:
            for i, log in enumerate(logs):
                numbers = [str(n) for n in (n_processes, i, n_local_devices)]
                processes.append(_start([*command, *numbers], log))
            in_time = _wait(processes, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = [log.read_text(errors="replace") for log in logs]
    failed = _failures(processes, texts, in_time, timeout_s)
    assert not failed, "\n".join(failed + [_titled(i, t) for i, t in enumerate(texts)])
    return texts


def free_port() -> int:
    """Gives a TCP port that nobody listens on right now."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def child_environment() -> dict[str, str]:
    """Gives this process's environment, with its import path for child processes."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _start(command: list[str], log: pathlib.Path) -> subprocess.Popen:
    with log.open("w") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=child_environment()
        )


def _wait(processes: list[subprocess.Popen], timeout_s: float) -> bool:
    """Returns True once all have ended, False at the limit; a failure shortens it."""
    end = time.monotonic() + timeout_s
    shortened = False
    while any(process.poll() is None for process in processes):
        if not shortened and any(process.poll() for process in processes):
            end = min(end, time.monotonic() + GRACE_S)
            shortened = True
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _failures(processes, texts, in_time: bool, timeout_s: float) -> list[str]:
    """Says of each process that failed how it ended."""
    failed = []
    for i, (process, text) in enumerate(zip(processes, texts, strict=True)):
        if process.returncode != 0 or SUMMARY not in text:
            which = f"rank {i} of {len(processes)}"
            failed.append(f"{which} ended with status {process.returncode}")
    if not in_time:
        failed.insert(0, f"not all ranks ended in {timeout_s:g} s; the rest was killed")
    return failed


def _titled(rank: int, text: str) -> str:
    return f"--- log of rank {rank} ---\n{text}"


def _join(address: str, n_processes: int, index: int, n_local_devices: int) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", n_local_devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.distributed.initialize(address, n_processes, index)
    assert len(jax.devices()) == n_processes * n_local_devices


def main() -> None:
    """Joins the job, calls the target, leaves the job."""
    target, address, *numbers = sys.argv[1:]
    module, function = target.split(":")
    try:
        _join(address, *(int(n) for n in numbers))
        getattr(importlib.import_module(module), function)()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        # An orderly exit would wait for the other processes to leave the job.
        os._exit(1)
    import jax

    jax.distributed.shutdown()
    print(SUMMARY, flush=True)


if __name__ == "__main__":
    main()
