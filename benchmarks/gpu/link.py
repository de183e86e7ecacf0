"""What the links carry: copies between all pairs of GPUs at the same time."""

from __future__ import annotations

import json
import pathlib
import statistics
import subprocess
import time
from typing import Any

import jax
import numpy as np

_REPEATS = 7

#: From ffi/tests/p2p_link.cu, where tools/gpu_bench.sh has built it.
PROGRAM = pathlib.Path("build/p2p_link")


def measure(devices: list[jax.Device], n_bytes: int = 1 << 29) -> dict[str, Any]:
    """GB/s that leave each GPU, every GPU to every other at the same time.

    By a kernel's stores and by copy engines, where there is the program for it;
    otherwise by `jax.device_put`.
    """
    if len(devices) == 1:
        return {"failed": ["one GPU has no link"]}
    if PROGRAM.exists():
        sizes = (len(devices), max(n_bytes >> 20, 1))
        command = [str(PROGRAM.resolve()), *map(str, sizes)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode:
            return {"failed": [f"{PROGRAM.name}: {done.stderr.strip()}"]}
        method = "a kernel's 16-byte stores, every GPU to every other at the same time"
        return {"method": method, **json.loads(done.stdout)}
    return _measure_device_put(devices, n_bytes)


def _measure_device_put(devices: list[jax.Device], n_bytes: int) -> dict[str, Any]:
    """The time is that of a second and third round of copies behind a first one."""
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
