"""Runs a function, or tests, in several processes of one `jax.distributed` job, on CPU or GPUs.

`run_processes` and `run_pytest` are the test's side. Run as a script, this file is one process of
the job: it joins, calls the function, and writes `SUMMARY` as its last line. A process that ends
without it has failed, whatever its exit status.
"""

import contextlib
import dataclasses
import importlib
import os
import pathlib
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence

SUMMARY = "process finished"
# This interpreter with its options: without them, a process would find an editable install first.
PYTHON = (sys.executable, *["-S"] * sys.flags.no_site, *["-P"] * sys.flags.safe_path)
GRACE_S = 5.0  # for the others, once one process has failed
FAREWELL_S = 3.0  # how much longer than the others process 0, which serves the job, lives


@dataclasses.dataclass(frozen=True)
class Host:
    """The launcher and environment of a process on a simulated host; see hosts.py."""

    launcher: tuple[str, ...] = ()  # before the command of the process
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def run_processes(
    n_processes: int,
    target: str,
    *,
    n_local_devices: int = 1,
    gpus: Sequence[str] | None = None,
    hosts: Sequence[Host] | None = None,
    timeout_s: float = 240.0,
) -> list[str]:
    """Calls `target` ("module:function") in every process; returns their logs.

    Each process has `n_local_devices` CPU devices; with `gpus`, the GPUs that its entry gives as
    CUDA_VISIBLE_DEVICES. With `hosts`, each is on the host of its entry. Processes of a host may
    share a GPU if no collective of XLA is between them.

    Raises:
        AssertionError: a process failed, or was still running after `timeout_s`; the text holds
            every process's log. No process is left behind.
    """
    n_cpus = 0 if gpus else n_local_devices
    environments = [_gpu_environment(gpus[i]) if gpus else {} for i in range(n_processes)]
    with reserved_port() as port:
        first = [*PYTHON, __file__, target, f"localhost:{port}"]
        commands = [[*first, *map(str, (n_processes, i, n_cpus))] for i in range(n_processes)]
        return _run_on_hosts(hosts, commands, SUMMARY, timeout_s, environments)


def run_pytest(
    n_processes: int,
    files: Sequence[str],
    *options: str,
    gpus: Sequence[str] | None = None,
    hosts: Sequence[Host] | None = None,
    timeout_s: float = 240.0,
) -> list[str]:
    """Runs test files in every process of a job, as `run_processes` does; returns the logs.

    Raises:
        AssertionError: as `run_processes`, or the numbers of tests that passed differ.
    """
    command = [*PYTHON, "-m", "pytest", "-p", "no:cacheprovider", "--color=no"]
    command += [f"--n-processes={n_processes}", *options, *(str(find_tests(f)) for f in files)]
    environments = [_gpu_environment(gpus[i]) if gpus else {} for i in range(n_processes)]
    with reserved_port() as port:
        command.append(f"--coordinator=localhost:{port}")
        commands = [[*command, f"--process-id={i}"] for i in range(n_processes)]
        logs = _run_on_hosts(hosts, commands, " passed", timeout_s, environments)
    found = [re.search(r"=+ (\d+ passed.*) in .*=", log) for log in logs]
    results = {each and each.group(1) for each in found}
    assert None not in results and len(results) == 1, _all_logs(logs)
    return logs


def find_tests(name: str) -> pathlib.Path:
    """The path of a file of tests."""
    (path,) = pathlib.Path(__file__).parents[1].rglob(name)
    return path


def _run_on_hosts(
    hosts: Sequence[Host] | None,
    commands: Sequence[list[str]],
    summary: str,
    timeout_s: float,
    environments: Sequence[dict[str, str]],
) -> list[str]:
    hosts = hosts or [Host()] * len(commands)
    on_hosts = [[*host.launcher, *each] for host, each in zip(hosts, commands, strict=True)]
    added = [each | host.environment for host, each in zip(hosts, environments, strict=True)]
    return run_commands(on_hosts, summary, timeout_s, added)


def run_commands(
    commands: Sequence[list[str]],
    summary: str,
    timeout_s: float,
    environments: Sequence[dict[str, str]] | None = None,
) -> list[str]:
    """Runs each command in a process, with its entry of `environments` added; returns the logs.

    Raises as `run_processes` does; `summary` must occur in the log of every process.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = [pathlib.Path(folder, f"{i}.log") for i in range(len(commands))]
        processes = []
        try:
            for i, command in enumerate(commands):
                added = environments[i] if environments else {}
                processes.append(_start(command, logs[i], added))
            is_done = _wait(processes, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = [log.read_text(errors="replace") for log in logs]
    failures = _failures(processes, texts, summary)
    if not is_done:
        failures.insert(0, f"not all processes ended within {timeout_s:g} s; the rest was killed")
    assert not failures, "\n".join([*failures, _all_logs(texts)])
    return texts


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Reserves a TCP port, which no other job of these tests on this machine gets meanwhile.

    The port is below the range from which Linux takes ports for connections. A socket in the
    abstract namespace reserves it and vanishes with this process.
    """
    for port in random.sample(range(20_000, 32_000), 1000):
        with socket.socket(socket.AF_UNIX) as reservation, socket.socket() as listener:
            try:
                reservation.bind(f"\0jax_ep test port {port}")
                listener.bind(("localhost", port))
            except OSError:
                continue
            listener.close()
            yield port
            return
    raise RuntimeError("found no free port among 1000 between 20000 and 32000")


def visible_gpus() -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES may name; does not start CUDA in this process."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name]
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


def _gpu_environment(gpus: str) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": gpus, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def child_environment() -> dict[str, str]:
    """This process's environment, with its import path for child processes."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _start(command: list[str], log: pathlib.Path, added: dict[str, str]) -> subprocess.Popen:
    environment = child_environment() | added
    with log.open("w") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)


def _wait(processes: list[subprocess.Popen], timeout_s: float) -> bool:
    """Whether all processes ended in time; once one has failed, the others get `GRACE_S`."""
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
    """How each process that failed has ended."""
    failed = []
    for i, (process, text) in enumerate(zip(processes, texts, strict=True)):
        if process.returncode != 0 or summary not in text:
            which = f"process {i} of {len(processes)}"
            failed.append(f"{which} ended with status {process.returncode}")
    return failed


def _all_logs(texts: Sequence[str]) -> str:
    return "\n".join(f"--- log of process {i} ---\n{text}" for i, text in enumerate(texts))


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
    """Exits with success without shutting down the job, for when other processes have died.

    Process 0 serves the job and must exit last.
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
        if module.startswith("test_"):
            sys.path.append(str(find_tests(f"{module}.py").parent))
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
