"""The findings of `python -m jax_ep doctor`, as plain data.

`report` is its JSON. Its keys are documented in docs/gpus.md; scripts read them, so they stay.
"""

import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any, NamedTuple

import jax

import jax_ep
from jax_ep.cli import links, probe
from jax_ep.ffi import extension
from jax_ep.nodes.nvshmem import bootstrap as nvshmem_bootstrap


class Device(NamedTuple):
    """A device of this process."""

    rank: int
    id: int
    platform: str
    kind: str
    memory_bytes: int | None  # that JAX may use; None: no limit is known


class Link(NamedTuple):
    """Copies from one GPU to another."""

    source: int  # device id
    target: int
    gb_per_s: float
    direct: bool | None  # whether the source can load and store there; None: not known


def versions(found: Sequence[jax.Device]) -> dict[str, str]:
    """Of Python, of packages, and of the backend of the devices."""
    packages = {name: metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
    backend = found[0].client.platform_version.replace("\n", ", ")
    own = {"python": platform.python_version(), "jax_ep": jax_ep.__version__}
    return own | packages | {"backend": backend}


def cuda_versions() -> dict[str, str | None] | None:
    """Of CUDA's driver and runtime; None where there is none, and without the extension."""
    try:
        numbers = extension.load_cuda().cuda_versions()
    except ImportError:
        return None
    return {
        name.removeprefix("CUDA "): f"{number // 1000}.{number % 1000 // 10}" if number else None
        for name, number in numbers.items()
    }


def nvshmem() -> dict[str, str | None]:
    """NVSHMEM's version, or why transport `nvshmem` cannot use it."""
    reason = nvshmem_bootstrap.why_missing()
    version = nvshmem_bootstrap.version() if reason is None else None
    return {"version": version, "reason": reason}


def devices(found: Sequence[jax.Device]) -> list[Device]:
    """In rank order."""
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in found]
    return [
        Device(rank, each.id, each.platform, each.device_kind, limit)
        for rank, (each, limit) in enumerate(zip(found, limits, strict=True))
    ]


def measured_links(found: Sequence[jax.Device]) -> list[Link]:
    """From each device to each other one."""
    return [
        Link(source.id, target.id, links.gb_per_s(source, target), links.reaches(source, target))
        for source in found
        for target in found
        if source != target
    ]


def report(found: Sequence[jax.Device], with_links: bool) -> dict[str, Any]:
    """All facts, as JSON has them."""
    gpus = [device for device in found if device.platform == "gpu"] if with_links else []
    return {
        "versions": versions(found),
        "cuda": cuda_versions(),
        "nvshmem": nvshmem(),
        "devices": [each._asdict() for each in devices(found)],
        "links": [each._asdict() for each in measured_links(gpus)],
        "transports": [
            {"name": name, "works": reason is None, "reason": reason}
            for name, reason in probe.try_transports(found)
        ],
    }
