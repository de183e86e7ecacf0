"""The mesh, data x expert, and where arrays are on it.

Batches are sharded over all devices. So is every large matrix where it is stored: the experts'
along the expert axis by expert and along the data axis by hidden size, the others by hidden size.
They are gathered for use, in the dtype of the matmuls.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DATA, EXPERT = "data", "expert"
ALL = DATA, EXPERT


def make_mesh(n_data: int, n_expert: int | None) -> Mesh:
    """Returns a mesh of n_data x n_expert devices; None takes all devices, or 8 virtual ones.

    Raises:
        ValueError: there are too few devices.
    """
    # Twice as many, so that programs may run ahead (docs/sharp_bits.md). No effect on GPUs.
    jax.config.update("jax_num_cpu_devices", 2 * (n_data * n_expert if n_expert else 8))
    devices = jax.devices()
    n_usable = len(devices) if devices[0].platform != "cpu" else len(devices) // 2
    n_expert = n_expert or max(1, n_usable // n_data)
    if n_data * n_expert > n_usable:
        raise ValueError(
            f"The mesh must have at most {n_usable} devices, as many as there are; got "
            f"{n_data} x {n_expert}."
        )
    return Mesh(np.array(devices[: n_data * n_expert]).reshape(n_data, n_expert), ALL)


def put_batch(mesh: Mesh, batch: Any) -> jax.Array:
    """Returns a batch on the devices, sharded by sequence."""
    return jax.device_put(batch, NamedSharding(mesh, P(ALL)))


def gather(mesh: Mesh, array: jax.Array) -> jax.Array:
    """Returns an array that every device has all of."""
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, P()))
