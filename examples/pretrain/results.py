"""What a run says of itself: its speed, where it ran and what it computed."""

import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sizes import Sizes
from train import History

N_WARM_UP = 2  # first steps of a run that its speed leaves out: they compile
# Dense bfloat16, TFLOP/s, from the data sheets of the SXM modules.
PEAKS = {
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H200": 989,
    "NVIDIA B200": 2250,
}


def speed_of(history: History, sizes: Sizes, n_tokens: float, sequence: int) -> dict[str, Any]:
    """Returns the speed of the median step, per device; `n_tokens` of a step on a device.

    Model FLOPs are `Sizes.flops_per_token`. Their share of the peak (MFU) is None where no peak is
    known, as on CPUs.
    """
    seconds = history.seconds[N_WARM_UP:] or history.seconds
    tokens_per_s = n_tokens / float(np.median(seconds))
    tflops = tokens_per_s * sizes.flops_per_token(sequence) / 1e12
    peak = PEAKS.get(jax.devices()[0].device_kind)
    return {
        "step_ms": round(1e3 * float(np.median(seconds)), 2),
        "tokens_per_s_per_device": round(tokens_per_s, 1),
        "model_tflop_per_s_per_device": round(tflops, 3),
        "peak_tflop_per_s": peak,
        "mfu": peak and round(tflops / peak, 4),
    }


def peak_memory_gb() -> float | None:
    """Returns the most memory that a device has had in use; None where JAX does not know it."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [each["peak_bytes_in_use"] for each in stats if each]
    return round(max(peaks) / 1e9, 2) if peaks else None


def rows_of_ranks(group: Any) -> np.ndarray | None:
    """Returns the rows that each rank took in all calls; None without a group that counts them."""
    if group is None or group.transport == "xla":
        return None
    rows = np.zeros(group.n_ranks)
    for one in group.stats():
        rows[one.rank] += one.rows_per_expert.sum() + one.rows_per_copy.sum()
    return rows


def environment() -> dict[str, Any]:
    """Returns devices, versions, commit and command."""
    names = "jax", "jaxlib", "flax", "optax", "jax_ep"
    return {
        "device": jax.devices()[0].device_kind,
        "versions": {name: importlib.metadata.version(name) for name in names}
        | {"python": platform.python_version()},
        "commit": commit(),
        "command": shlex.join(["python", *sys.argv]),
    }


def commit() -> str | None:
    """Returns the commit of this file's repository, with a + if files differ from it, or None."""
    try:
        git = ["git", "-C", str(Path(__file__).parent)]
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )
        if head.returncode:
            return None
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return head.stdout.strip() + "+" * bool(changes.stdout.strip())


def write(path: Path, facts: dict[str, Any], history: History) -> None:
    """Writes a run's facts and its steps as JSON."""
    steps = {
        "first_step": history.first_step,
        "loss": history.column("loss").tolist(),
        "balance_loss": history.column("balance_loss").tolist(),
        "z_loss": history.column("z_loss").tolist(),
        "grad_norm": history.column("grad_norm").tolist(),
        "n_dropped": history.column("n_dropped").tolist(),
        "busiest_expert": history.busiest.round(3).tolist(),
        "seconds": [round(seconds, 5) for seconds in history.seconds],
    }
    path.write_text(json.dumps(facts | {"steps": steps}, indent=1) + "\n")
