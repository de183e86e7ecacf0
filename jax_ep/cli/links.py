"""The links between GPUs: who reaches whose memory, and how fast copies are."""

import statistics
import time

import jax
import numpy as np

from jax_ep.ffi import extension

_BYTES = 1 << 27
_COPIES, _REPEATS = 8, 5


def reaches(source: jax.Device, target: jax.Device) -> bool | None:
    """Whether a device can access another's memory directly; None if unknown."""
    try:
        load = extension.load_cuda()
    except ImportError:
        return None
    pair = [source.local_hardware_id, target.local_hardware_id]
    return not load.peer_access_problem(pair)


def gb_per_s(source: jax.Device, target: jax.Device, n_bytes: int = _BYTES) -> float:
    """Median GB/s of `jax.device_put` from one device to another.

    Several large copies at a time, so that the link hides their launch overhead.
    """
    array = jax.device_put(np.zeros(n_bytes, np.uint8), source)
    seconds = [_copy(array, target) for _ in range(_REPEATS + 1)]
    # The first one allocates.
    return _COPIES * n_bytes / statistics.median(seconds[1:]) * 1e-9


def _copy(array: jax.Array, target: jax.Device) -> float:
    start = time.perf_counter()
    copies = [jax.device_put(array, target, may_alias=False) for _ in range(_COPIES)]
    jax.block_until_ready(copies)
    return time.perf_counter() - start
