"""What the links carry: copies between all pairs of GPUs at the same time."""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import numpy as np

_REPEATS = 7


def measure(devices: list[jax.Device], n_bytes: int = 1 << 29) -> dict[str, Any]:
    """GB/s that leave each GPU by `jax.device_put`, every GPU to every other.

    The time is that of a second and third round of copies behind a first one.
    """
    if len(devices) == 1:
        return {"failed": ["one GPU has no link"]}
    arrays = [
        jax.device_put(np.full(n_bytes // 4, i, np.int32), device)
        for i, device in enumerate(devices)
    ]
    pairs = [(a, to) for a in arrays for to in devices if to not in a.devices()]
    sources, targets = [a for a, _ in pairs], [to for _, to in pairs]
    seconds = []
    for repeat in range(_REPEATS + 1):
        times = {n: _copy(sources, targets, n) for n in (1, 3)}
        if repeat:  # the first one warms up
            seconds.append((times[3] - times[1]) / 2)
    middle = statistics.median(seconds)
    sent = n_bytes * (len(devices) - 1)
    return {
        "method": "jax.device_put of every GPU to every other, at the same time",
        "bytes_per_pair": n_bytes,
        "gb_s": round(sent / middle * 1e-9, 1),
        "gb_s_min": round(sent / max(seconds) * 1e-9, 1),
        "gb_s_max": round(sent / min(seconds) * 1e-9, 1),
        "n": len(seconds),
    }


def _copy(sources: list[jax.Array], targets: list[Any], n_rounds: int) -> float:
    start = time.perf_counter()
    copies = [
        jax.device_put(sources, targets, may_alias=False) for _ in range(n_rounds)
    ]
    jax.block_until_ready(copies)
    return time.perf_counter() - start
