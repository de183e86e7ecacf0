"""Several hosts that are one machine: what makes its libraries believe in them.

Each of n processes gets a `processes.Host`; consecutive processes are on the same one. Hosts are
told apart by names, addresses of the loopback interface: they resolve without an entry in a file.
"""

import os
import pathlib
import shutil
import subprocess
import sys

from processes import Host

_RIGS = pathlib.Path(__file__).parents[1] / "rigs"
_AS_HOST = (sys.executable, str(_RIGS / "as_host.py"))
# The libraries that NVSHMEM's UCX transport opens, and that UCX opens to copy memory of GPUs.
UCX_LIBRARIES = ("libucp.so.0", "libuct.so.0", "libucs.so.0", "libucm.so.0", "ucx/libuct_cuda.so.0")
RATE_SHIM = "librate_shim.so"  # counts and limits what a process sends
_SHARED_MEMORY = pathlib.Path("/dev/shm")


def names(n_hosts: int) -> list[str]:
    """Host names that no other job of this machine uses meanwhile."""
    high, low = divmod(os.getpid() % 2**16, 2**8)
    return [f"127.{high}.{low}.{i + 2}" for i in range(n_hosts)]


def _of_processes(hosts: list[Host], n_processes: int) -> list[Host]:
    return [hosts[i * len(hosts) // n_processes] for i in range(n_processes)]


def by_name(n_processes: int, n_hosts: int) -> list[Host]:
    """Hosts that `gethostname` tells apart."""
    return _of_processes([Host((*_AS_HOST, name)) for name in names(n_hosts)], n_processes)


def for_nccl(n_processes: int, n_hosts: int) -> list[Host]:
    """Hosts for NCCL, which then connects them by sockets, and says so.

    It also lets processes of different hosts have the same GPU.
    """
    hosts = [
        Host(environment={"NCCL_HOSTID": name, "NCCL_DEBUG": "INFO"}) for name in names(n_hosts)
    ]
    return _of_processes(hosts, n_processes)


def for_nvshmem(
    n_processes: int,
    n_hosts: int,
    *,
    shims: pathlib.Path,
    heap_bytes: int,
    counts_sent: bool = False,
) -> list[Host]:
    """Hosts for NVSHMEM, which then connects them by UCX, over TCP.

    Args:
        n_processes: of the job.
        n_hosts: of the job.
        shims: the folder of `build_shims`.
        heap_bytes: of the symmetric heap of each process, all of it in /dev/shm.
        counts_sent: whether processes count what they send, and can limit its rate: network.py.
    """
    folders = [_ucx_folder(), str(shims), os.environ.get("LD_LIBRARY_PATH", "")]
    preloaded = ["libucx_shim.so", *([RATE_SHIM] if counts_sent else [])]
    environment = {
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, folders)),
        "LD_PRELOAD": os.pathsep.join(str(shims / library) for library in preloaded),
        "NVSHMEM_REMOTE_TRANSPORT": "ucx",
        "NVSHMEM_HEAP_KIND": "SYSMEM",
        "NVSHMEM_SYMMETRIC_SIZE": str(heap_bytes),
        "UCX_WARN_UNUSED_ENV_VARS": "n",
    }
    hosts = [Host((*_AS_HOST, name), environment) for name in names(n_hosts)]
    return _of_processes(hosts, n_processes)


def build_shims(folder: pathlib.Path) -> None:
    """Compiles what NVSHMEM's hosts load in place of a library, or before it."""
    compiler = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"]
    libraries = {"ucx_shim": "libucx_shim.so", "gdrapi_shim": "libgdrapi.so.2"}
    for source, library in (libraries | {"rate_shim": RATE_SHIM}).items():
        target = ["-o", str(folder / library), f"-Wl,-soname,{library}"]
        command = [*compiler, "-shared", "-fPIC", *target, str(_RIGS / f"{source}.cc"), "-ldl"]
        subprocess.run(command, check=True, timeout=60)


def heaps() -> list[pathlib.Path]:
    """NVSHMEM's heaps of this job's hosts in shared memory, which killed processes leave there."""
    prefix = names(1)[0].rpartition(".")[0]
    return sorted(_SHARED_MEMORY.glob(f"sysmem_symm_heap.{prefix}.*"))


def why_no_names() -> str | None:
    """Why processes of this machine cannot have host names of their own; None if they can."""
    command = [*_AS_HOST, *names(1), "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return None if done.returncode == 0 else done.stderr.splitlines()[-1]


def why_no_nvshmem(n_bytes: int) -> str | None:
    """The requirement of `for_nvshmem` that is missing for heaps of `n_bytes` in all, or None."""
    if not _ucx_folder():
        return "needs the folder of UCX's libraries in JAX_EP_TEST_UCX: libucx/lib of libucx-cu13"
    missing = [name for name in UCX_LIBRARIES if not pathlib.Path(_ucx_folder(), name).exists()]
    if missing:
        return f"JAX_EP_TEST_UCX={_ucx_folder()} lacks {', '.join(missing)}"
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return "needs a C++ compiler"
    free = shutil.disk_usage(_SHARED_MEMORY).free
    if free < n_bytes:
        return f"needs {n_bytes >> 20} MiB of shared memory, found {free >> 20}"
    return why_no_names()


def _ucx_folder() -> str:
    return os.environ.get("JAX_EP_TEST_UCX", "")
