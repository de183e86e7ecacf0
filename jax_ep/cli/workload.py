"""A mesh of this process's devices, and inputs on it, for the commands."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import jax_ep

AXIS = "ep"


def devices(platform: str | None, n_ranks: int | None) -> list[jax.Device]:
    """This process's devices, virtual ones on a CPU; raises RuntimeError if too few."""
    if n_ranks is not None:
        # Fails if JAX has already created its devices; then those are used. Twice as many as ranks,
        # so that XLA before jaxlib 0.12 has threads for programs that run ahead.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", 2 * n_ranks)
    try:
        found = jax.local_devices(backend=platform)
    except AssertionError as error:  # what JAX raises for a platform without devices
        raise RuntimeError(
            f"JAX finds no device of platform {platform or '(default)'}. Is its plugin installed, "
            "and does it see a device?"
        ) from error
    if n_ranks is not None and len(found) < n_ranks:
        raise RuntimeError(
            f"{n_ranks} ranks need as many devices; platform {found[0].platform!r} has "
            f"{len(found)}."
        )
    return found[:n_ranks]


def advice(found: Sequence[jax.Device]) -> str | None:
    """Advice if there is only one CPU device, with which nothing is exchanged."""
    if len(found) > 1 or found[0].platform != "cpu":
        return None
    return "One CPU device; --ranks 8 makes virtual ones."


def make_mesh(ranks: Sequence[jax.Device]) -> jax.sharding.Mesh:
    """A mesh with one axis, `AXIS`."""
    return jax.sharding.Mesh(np.array(ranks), (AXIS,))


def on_mesh(mesh: jax.sharding.Mesh, body: Callable[..., Any]) -> Callable[..., Any]:
    """Jits a function of one rank's arrays over arrays with a leading axis of ranks."""

    def of_rank(*args: Any) -> Any:
        results = body(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], results)

    spec = jax.P(AXIS)
    return jax.jit(jax.shard_map(of_rank, mesh=mesh, in_specs=spec, out_specs=spec))


def shard(mesh: jax.sharding.Mesh, array: np.ndarray) -> jax.Array:
    """Puts `array[rank]` on the device of each rank."""
    return jax.device_put(array, jax.NamedSharding(mesh, jax.P(AXIS)))


def random_choices(config: jax_ep.EPConfig, n_ranks: int, seed: int) -> np.ndarray:
    """`int32[R, M, K]`: distinct experts per token, all equally likely."""
    rng = np.random.default_rng(seed)
    order = rng.random((n_ranks, config.max_tokens_per_rank, config.n_experts))
    return np.argsort(order, axis=-1)[..., : config.top_k].astype(np.int32)
