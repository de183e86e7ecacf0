"""Whether XLA:CPU has enough threads for programs to run ahead of their results.

XLA:CPU has one pool of threads to start programs and to run them. A program on n devices takes n
threads until it ends. Starting one takes n more, and these block while each device has 32 programs
in flight. So with fewer than 2 n threads, the starting of a program may take the threads that an
earlier one needs to end. No handler can prevent that: the thread of a rank waits in XLA itself
until the rank's results are there, and those need all ranks. jaxlib 0.12 starts programs on threads
of their own.
"""

import os
import warnings
from typing import Any

import jax
import jaxlib

MAX_IN_FLIGHT = 32  # programs per device

_warned = False


def how_to_run_ahead(mesh: jax.sharding.Mesh) -> str | None:
    """The threads that programs on the mesh need, and advice; None if XLA has enough threads."""
    n_devices = len(mesh.local_devices)
    if n_devices <= 1 or _starts_on_own_threads():
        return None
    needed, found = 2 * n_devices, n_threads(mesh.devices.flat[0].client)
    if found >= needed:
        return None
    return (
        f"With more than {MAX_IN_FLIGHT} programs on {n_devices} CPU devices in flight, XLA needs "
        f"{needed} threads; it has {found}. Wait for a result (jax.block_until_ready) at least "
        f"every {MAX_IN_FLIGHT} programs, or set PJRT_NPROC={needed} in the environment."
    )


def warn_once(advice: str, stacklevel: int) -> None:
    """Warns with the advice, once per process; `stacklevel` counts from the caller, which is 1."""
    global _warned
    if not _warned:
        warnings.warn(advice, RuntimeWarning, stacklevel=stacklevel + 1)
        _warned = True


def n_threads(client: Any) -> int:
    """Threads on which a CPU client starts and runs programs."""
    return max(_n_threads_by_default(), client.local_device_count())


def _n_threads_by_default() -> int:
    for name in ("PJRT_NPROC", "NPROC"):
        try:
            return int(os.environ[name])
        except (KeyError, ValueError):
            continue
    return len(os.sched_getaffinity(0))


def _starts_on_own_threads() -> bool:
    major, minor = jaxlib.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (0, 12)
