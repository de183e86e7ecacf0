"""Arrays of all ranks on a mesh, and bits compared with the oracle's.

An array of the whole mesh has a leading axis with one entry per device, in the mesh's
flattened order; a per-rank function sees it without that axis. Only the shards of this
process's devices are read back, so the same code serves one process and many.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

AXIS = "ep"


def make_mesh(n_ranks: int, dp: int = 1, *, names=None, reverse=False) -> Mesh:
    """Gives a ("ep",) mesh, or ("dp", "ep") with `dp` > 1; skips if it is too large.

    With `names`, every axis but "ep" has size 2. With several processes a mesh has to
    hold the devices of all of them.
    """
    if names is None:
        sizes = {"dp": dp, AXIS: n_ranks} if dp > 1 else {AXIS: n_ranks}
    else:
        sizes = {name: n_ranks if name == AXIS else 2 for name in names}
    n_devices = math.prod(sizes.values())
    found = len(jax.devices())
    if found < n_devices or (jax.process_count() > 1 and found != n_devices):
        pytest.skip(f"needs {n_devices} devices, found {found}")
    devices = np.array(jax.devices()[:n_devices])
    if reverse:
        devices = devices[::-1]
    return Mesh(devices.reshape(*sizes.values()), tuple(sizes))


def skip_if_xla_crashes(case) -> None:
    """Skips cases without tokens on jax 0.11.

    `jnp.linalg.cholesky` beside an empty operand of `shard_map` crashes there, too.
    """
    if case.n_tokens == 0 and jax.__version_info__[:2] == (0, 11):
        pytest.skip("XLA of jax 0.11 crashes on custom calls beside empty operands")


def positions(mesh: Mesh) -> list[tuple[int, int]]:
    """Gives (group, rank) of each device, in the mesh's flattened order."""
    axis = mesh.axis_names.index(AXIS)
    ranks = np.indices(mesh.devices.shape)[axis].ravel()
    seen = [0] * mesh.shape[AXIS]
    result = []
    for rank in ranks:
        result.append((seen[rank], int(rank)))
        seen[rank] += 1
    return result


def n_groups(mesh: Mesh) -> int:
    """Gives the number of groups of ranks, each a row along the "ep" axis."""
    return mesh.size // mesh.shape[AXIS]


def on_mesh(mesh: Mesh, fn, *, check_vma: bool = True, **jit_options):
    """Jits a per-rank function over the mesh."""
    return jax.jit(on_mesh_eager(mesh, fn, check_vma=check_vma), **jit_options)


def on_mesh_eager(mesh: Mesh, fn, *, check_vma: bool = True):
    """Maps a per-rank function over the mesh, not jitted."""

    def body(*args):
        args = jax.tree.map(lambda x: x[0], args)
        return jax.tree.map(lambda x: x[None], fn(*args))

    spec = P(mesh.axis_names)
    return jax.shard_map(
        body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
    )


def place(mesh: Mesh, arrays) -> jax.Array:
    """Puts `arrays[group][rank]` on the device of that group and rank."""
    stacked = np.stack([arrays[group][rank] for group, rank in positions(mesh)])
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    return jax.make_array_from_callback(
        stacked.shape, sharding, lambda index: stacked[index]
    )


def shards(mesh: Mesh, tree):
    """Yields ((group, rank), the rank's arrays) for each device of this process."""
    leaves, treedef = jax.tree.flatten(tree)
    by_device = [{s.device: s for s in leaf.addressable_shards} for leaf in leaves]
    where = positions(mesh)
    for i, device in enumerate(mesh.devices.flat):
        if device in by_device[0]:
            local = [_entry(shards_of[device], i) for shards_of in by_device]
            yield where[i], jax.tree.unflatten(treedef, local)


def _entry(shard, i: int) -> np.ndarray:
    """Gives entry `i` of an array; an empty array is whole on every device."""
    return np.asarray(shard.data)[i - (shard.index[0].start or 0)]


QUANTISED = {
    "blockwise_fp8": jax_ep.BlockwiseFP8,
    "mxfp8": jax_ep.MXFP8,
    "mxfp4": jax_ep.MXFP4,
    "nvfp4": jax_ep.NVFP4,
}


def format_of(case) -> jax_ep.TokenFormat:
    """Gives the token format of a case."""
    if case.token_format in QUANTISED:
        layout = [case.scales_layout] if case.scales_layout else []
        return QUANTISED[case.token_format](*layout)
    dtype = jnp.dtype(case.token_dtype)
    return jax_ep.BF16() if dtype == jnp.bfloat16 else jax_ep.Plain(dtype)


def config_of(case, **changes) -> jax_ep.EPConfig:
    """Gives the `EPConfig` of a case."""
    fields = {
        "n_experts": case.n_experts,
        "top_k": case.top_k,
        "hidden_size": case.hidden_size,
        "max_tokens_per_rank": case.max_tokens,
        "token_format": format_of(case),
        "combine_dtype": jnp.dtype(case.combine_dtype),
        "recv_capacity": case.recv_capacity,
    } | case.flags
    return jax_ep.EPConfig(**(fields | changes))


def bits(array) -> np.ndarray:
    """Views an array's bytes as unsigned integers of its elements' size."""
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def assert_same_bits(actual, expected, what: str) -> None:
    """Compares shape, dtype and every bit; a mismatch names the first element."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype=} {expected.dtype=}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape=} {expected.shape=}"
    actual, expected = np.atleast_1d(actual), np.atleast_1d(expected)
    wrong = bits(actual) != bits(expected)
    if wrong.any():
        first = tuple(int(i[0]) for i in np.nonzero(wrong))
        raise AssertionError(
            f"{what}: {wrong.sum()} of {wrong.size} elements differ; the first is at "
            f"{first}: got {actual[first]}, expected {expected[first]}"
        )


def params(cases) -> list:
    """Gives pytest parameters with the cases' names; slow cases are marked."""
    marks = {True: [pytest.mark.slow], False: []}
    return [pytest.param(case, id=case.name, marks=marks[case.slow]) for case in cases]
