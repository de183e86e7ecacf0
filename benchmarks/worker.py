"""The measuring process: runs items and prints one JSON object per line.

Its parent (runner.py) sets the environment. The first line describes the devices. The last line of
an item has the keys `done` and `ends`: whether the process ends. Needs jax, NumPy and ml_dtypes
only.
"""

import json
import pathlib
import subprocess
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

import calls
import matmuls
import measure
import overhead
from case import Case
from implementations import AXIS
from machine import die_first
from plan import Item
from timing import Repeats

# tools/gpu_bench.sh builds it from ffi/tests/bench/p2p_link.cu.
_LINK = pathlib.Path("build/p2p_link")
_LINK_MEGABYTES = 512


def main(request: dict[str, Any]) -> None:
    """Runs a request: JAX's `platform`, the package's `transport`, and `items`.

    As one of several processes, also the `job`: its address, its size, and this process's index.
    """
    die_first()
    if "job" in request:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(*request["job"])
    devices = jax.devices(request["platform"])
    mesh = Mesh(devices, (AXIS,), axis_types=(AxisType.Auto,))
    _print({"run": {"device": devices[0].device_kind, "n_devices": len(devices)}})
    for fields in request["items"]:
        item, ends = _from_json(fields), False
        try:
            for line in _measure(item, mesh, request["transport"]):
                _print(line)
        except Exception as error:  # the other items go on
            _print({"failed": f"{type(error).__name__}: {error}"[:2000]})
            ends = measure.breaks_devices(error)
        _print({"done": item.name, "ends": ends})
        if ends:
            return


def _measure(item: Item, mesh: Mesh, transport: str) -> Iterator[dict[str, Any]]:
    kinds = {
        "case": lambda: measure.measure(item, mesh, transport),
        "calls": lambda: calls.measure(item, mesh, transport),
        "link": lambda: _measure_link(mesh.size),
        "matmuls": lambda: matmuls.measure(item, mesh.devices.flat[0]),
        "overhead": lambda: overhead.measure(item.repeats),
    }
    return kinds[item.kind]()


def _measure_link(n_devices: int) -> Iterator[dict[str, Any]]:
    """GB/s that leave each GPU while every GPU sends to every other."""
    if n_devices == 1 or not _LINK.exists():
        yield {"not_measured": f"needs several GPUs and {_LINK}"}
        return
    command = [str(_LINK.resolve()), str(n_devices), str(_LINK_MEGABYTES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    failed = {"failed": done.stderr.strip()}
    yield failed if done.returncode else {"links": json.loads(done.stdout)}


def _from_json(fields: dict[str, Any]) -> Item:
    case = fields["case"] and Case(**fields["case"])
    return Item(**{**fields, "case": case, "repeats": Repeats(**fields["repeats"])})


def _print(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)
