"""The links between GPUs: who reaches whose memory, and how fast copies are."""

from __future__ import annotations

import statistics
import time

import jax
import numpy as np

from jax_ep import _cuda_ffi

_BYTES = 1 << 27
_REPEATS = 5


def reaches(source: jax.Device, target: jax.Device) -> bool | None:
    """Whether a device loads and stores in another's memory; None: unknown."""
    try:
        extension = _cuda_ffi.load()
    except ImportError:
        return None
    pair = [source.local_hardware_id, target.local_hardware_id]
    return not extension.why_no_peer_access(pair)


def gb_per_s(source: jax.Device, target: jax.Device, n_bytes: int = _BYTES) -> float:
    """GB/s of copies from one device to another by `jax.device_put`; the median.

    The time is that of a second and a third copy behind a first one: what JAX takes
    to start a copy is not in it.
    """
    array = jax.device_put(np.zeros(n_bytes, np.uint8), source)
    seconds = []
    for _ in range(_REPEATS + 1):  # the first one warms up
        times = {n: _copy(array, target, n) for n in (1, 3)}
        seconds.append((times[3] - times[1]) / 2)
    return n_bytes / max(statistics.median(seconds[1:]), 1e-9) * 1e-9


def _copy(array: jax.Array, target: jax.Device, n_copies: int) -> float:
    start = time.perf_counter()
    copies = [jax.device_put(array, target, may_alias=False) for _ in range(n_copies)]
    jax.block_until_ready(copies)
    return time.perf_counter() - start
