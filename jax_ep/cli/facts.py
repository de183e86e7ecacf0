"""The findings of `python -m jax_ep doctor`, as plain data: what `--json` prints.

The keys are documented in docs/gpus.md; scripts read them, so they stay.
"""

import contextlib
import itertools
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep
from jax_ep.ffi import extension
from jax_ep.group.select import NAMES
from jax_ep.nodes.nvshmem import bootstrap as nvshmem_bootstrap

# Copies whose rate is measured: bytes of each, how many at a time, and how often.
_BYTES, _COPIES, _REPEATS = 1 << 27, 8, 5
_TOP_K = 2


def find_devices(backend: str | None, n_ranks: int | None) -> list[jax.Device]:
    """This process's devices, virtual ones on a CPU; raises RuntimeError if too few."""
    if n_ranks is not None:
        # Fails if JAX has already created its devices; then those are used. Twice as many as ranks,
        # so that XLA before jaxlib 0.12 has threads for programs that run ahead.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", 2 * n_ranks)
    try:
        found = jax.local_devices(backend=backend)
    except AssertionError as error:  # what JAX raises for a platform without devices
        raise RuntimeError(
            f"JAX finds no device of platform {backend or '(default)'}. Is its plugin installed, "
            "and does it see a device?"
        ) from error
    if n_ranks is not None and len(found) < n_ranks:
        raise RuntimeError(
            f"{n_ranks} ranks need as many devices; platform {found[0].platform!r} has "
            f"{len(found)}."
        )
    return found[:n_ranks]


def versions(found: Sequence[jax.Device]) -> dict[str, str]:
    """Versions of Python, of packages, and of the backend of the devices."""
    packages = {name: metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
    backend = found[0].client.platform_version.replace("\n", ", ")
    own = {"python": platform.python_version(), "jax_ep": jax_ep.__version__}
    return own | packages | {"backend": backend}


def cuda_versions() -> dict[str, str | None] | None:
    """Versions of CUDA's driver and runtime; None where there is none, or no extension."""
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


def devices(found: Sequence[jax.Device]) -> list[dict[str, Any]]:
    """The devices of this process in rank order; bytes that JAX may use, or None if not known."""
    return [
        {
            "rank": rank,
            "id": each.id,
            "platform": each.platform,
            "kind": each.device_kind,
            "memory_bytes": (each.memory_stats() or {}).get("bytes_limit"),
        }
        for rank, each in enumerate(found)
    ]


def measured_links(found: Sequence[jax.Device]) -> list[dict[str, Any]]:
    """Copies from each device to each other one, and whether it can load and store there."""
    return [
        {
            "source": source.id,
            "target": target.id,
            "gb_per_s": gb_per_s(source, target),
            "direct": reaches(source, target),
        }
        for source, target in itertools.permutations(found, 2)
    ]


def reaches(source: jax.Device, target: jax.Device) -> bool | None:
    """Whether a device can access another's memory directly; None if unknown."""
    try:
        load = extension.load_cuda()
    except ImportError:
        return None
    pair = [source.local_hardware_id, target.local_hardware_id]
    return not load.peer_access_problem(pair)


def gb_per_s(source: jax.Device, target: jax.Device, n_bytes: int = _BYTES) -> float:
    """Median GB/s of `jax.device_put`: several copies at a time, which hides their launches."""
    array = jax.device_put(np.zeros(n_bytes, np.uint8), source)
    seconds = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        copies = [jax.device_put(array, target, may_alias=False) for _ in range(_COPIES)]
        jax.block_until_ready(copies)
        seconds.append(time.perf_counter() - start)
    return _COPIES * n_bytes / statistics.median(seconds[1:]) * 1e-9  # the first one allocates


def try_transports(ranks: Sequence[jax.Device]) -> list[dict[str, Any]]:
    """Sends a few tokens there and back over each transport, one rank per device."""
    reasons = {name: _try(name, ranks) for name in NAMES}
    return [{"name": name, "works": why is None, "reason": why} for name, why in reasons.items()]


def _try(name: str, ranks: Sequence[jax.Device]) -> str | None:
    config = jax_ep.EPConfig(
        n_experts=2 * len(ranks),
        top_k=_TOP_K,
        hidden_size=64,
        max_tokens_per_rank=16,
        timeout_s=20.0,
    )
    try:
        with jax_ep.ep_init(jax.sharding.Mesh(ranks, "ep"), "ep", config, name) as group:
            return _round_trip(group)
    except ValueError as error:
        return str(error).removeprefix(f"Transport {name!r} cannot serve: ")
    except Exception as error:  # whatever a broken setup raises is the verdict
        return f"{type(error).__name__}: {error}"


def _round_trip(group: jax_ep.EPGroup) -> str | None:
    """With identity experts, every token must come back `top_k` times."""
    config, rng = group.config, np.random.default_rng(0)
    n_tokens = group.n_ranks * config.max_tokens_per_rank
    choices = rng.random((n_tokens, config.n_experts)).argsort()[:, :_TOP_K].astype(np.int32)
    tokens = rng.integers(-100, 100, (n_tokens, config.hidden_size)).astype(jnp.bfloat16)

    def layer(tokens: jax.Array, topk_ids: jax.Array) -> jax.Array:
        rows = jax_ep.dispatch(group, tokens, topk_ids)
        return jax_ep.combine(group, rows.tokens, rows)

    spec = jax.P(group.axis_name)
    call = jax.jit(jax.shard_map(layer, mesh=group.mesh, in_specs=spec, out_specs=spec))
    out = call(*jax.device_put((tokens, choices), jax.NamedSharding(group.mesh, spec)))
    n_wrong = int((np.asarray(out) != _TOP_K * tokens).sum())
    group.check()
    return f"{n_wrong} of {tokens.size} numbers came back wrong" if n_wrong else None


def findings(found: Sequence[jax.Device], with_links: bool) -> Iterator[tuple[str, Any]]:
    """All facts by their key, each as soon as it is known."""
    yield "versions", versions(found)
    yield "cuda", cuda_versions()
    yield "nvshmem", nvshmem()
    yield "devices", devices(found)
    gpus = [device for device in found if device.platform == "gpu"] if with_links else []
    yield "links", measured_links(gpus)
    yield "transports", try_transports(found)
