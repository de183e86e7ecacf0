"""The links between GPUs: who reaches whose memory, and how fast copies are."""

from __future__ import annotations

import statistics
import time

import jax
import numpy as np

from jax_ep import _cuda_ffi

_BYTES = 1 << 27
_COPIES, _REPEATS = 8, 5


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

    Several large ones at a time: what JAX takes to start them hides behind the link.
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
