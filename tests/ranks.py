"""Runs a function in several processes of one `jax.distributed` job, on CPU or GPUs.

`run_ranks` is the test's side. Run as a script, this file is one process of the job:
it joins, calls the function, and writes `SUMMARY` as its last line. A process that
ends without it has failed, whatever its exit status.
"""

from __future__ import annotations

import importlib
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence

SUMMARY = "rank finished"
GRACE_S = 5.0  # for the rest, once one process has failed
FAREWELL_S = 3.0  # until the others of a job have left, too


def run_ranks(
    n_processes: int,
    target: str,
    *,
    n_local_devices: int = 1,
    gpus: Sequence[str] | None = None,
    timeout_s: float = 240.0,
) -> list[str]:
    """Calls `target` ("module:function") in every process; gives their logs.

    Each has `n_local_devices` of the CPU; with `gpus`, what CUDA_VISIBLE_DEVICES is to
    be in each, those. Processes may share a GPU, as long as they use no collectives.

    Raises:
        AssertionError: a process failed or was still running after `timeout_s`; the
            text holds every process's log. No process is left behind.
    """
    first = [sys.executable, __file__, target, f"localhost:{free_port()}"]
    n_cpus = 0 if gpus else n_local_devices
    commands = [
        [*first, *map(str, (n_processes, i, n_cpus))] for i in range(n_processes)
    ]
    extras = [_gpu_environment(gpus[i]) if gpus else {} for i in range(n_processes)]
    return run_together(commands, SUMMARY, timeout_s, extras)


def run_pytest(
    n_processes: int,
    files: Sequence[str],
    *options: str,
    gpus: Sequence[str] | None = None,
    timeout_s: float = 240.0,
) -> list[str]:
    """Runs test files in every process of a job, as `run_ranks` does; gives the logs.

    Raises:
        AssertionError: as in `run_ranks`, or one passed another number of tests.
    """
    folder = pathlib.Path(__file__).parent
    job = [f"--coordinator=localhost:{free_port()}", f"--n-processes={n_processes}"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no"]
    command += [*job, *options, *(str(folder / file) for file in files)]
    logs = run_together(
        [[*command, f"--process-id={i}"] for i in range(n_processes)],
        " passed",
        timeout_s,
        [_gpu_environment(each) for each in gpus] if gpus else None,
    )
    found = [re.search(r"=+ (\d+ passed.*) in .*=", log) for log in logs]
    results = {each and each.group(1) for each in found}
    assert None not in results and len(results) == 1, "\n".join(
        _titled(i, text) for i, text in enumerate(logs)
    )
    return logs


def run_together(
    commands: Sequence[list[str]],
    summary: str,
    timeout_s: float,
    extras: Sequence[dict[str, str]] | None = None,
) -> list[str]:
    """Runs each command in a process, with `extras` in its environment.

    Raises as `run_ranks` does; `summary` is what stands in the log of a process that
    has done its work.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = [pathlib.Path(folder, f"{i}.log") for i in range(len(commands))]
        processes = []
        try:
            for i, command in enumerate(commands):
                extra = extras[i] if extras else {}
                processes.append(_start(command, logs[i], extra))
            in_time = _wait(processes, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = [log.read_text(errors="replace") for log in logs]
    failed = _failures(processes, texts, summary)
    if not in_time:
        failed.insert(0, f"not all ranks ended in {timeout_s:g} s; the rest was killed")
    assert not failed, "\n".join(failed + [_titled(i, t) for i, t in enumerate(texts)])
    return texts


def free_port() -> int:
    """Gives a TCP port that nobody listens on right now."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def visible_gpus() -> list[str]:
    """Gives what CUDA_VISIBLE_DEVICES may name, without starting CUDA here."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name]
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


def _gpu_environment(gpus: str) -> dict[str, str]:
    return {
        "CUDA_VISIBLE_DEVICES": gpus,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }


def child_environment() -> dict[str, str]:
    """Gives this process's environment, with its import path for child processes."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _start(
    command: list[str], log: pathlib.Path, extra: dict[str, str]
) -> subprocess.Popen:
    env = child_environment() | extra
    with log.open("w") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=env
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


def _failures(processes, texts, summary: str) -> list[str]:
    """Says of each process that failed how it ended."""
    failed = []
    for i, (process, text) in enumerate(zip(processes, texts, strict=True)):
        if process.returncode != 0 or summary not in text:
            which = f"rank {i} of {len(processes)}"
            failed.append(f"{which} ended with status {process.returncode}")
    return failed


def _titled(rank: int, text: str) -> str:
    return f"--- log of rank {rank} ---\n{text}"


def _join(address: str, n_processes: int, index: int, n_cpus: int) -> None:
    import jax

    if n_cpus:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", n_cpus)
    else:
        jax.config.update("jax_platforms", "cuda,cpu")
    n_local_devices = n_cpus or len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.distributed.initialize(address, n_processes, index)
    assert len(jax.devices()) == n_processes * n_local_devices


def leave() -> None:
    """Ends this process well without those that have died: their job cannot be left.

    The process that serves the job, 0, has to be the last.
    """
    import jax

    if jax.process_index() == 0:
        time.sleep(FAREWELL_S)
    print(SUMMARY, flush=True)
    os._exit(0)


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
