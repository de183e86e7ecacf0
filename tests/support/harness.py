"""Arrays of all ranks on a mesh, and bitwise comparison.

An array of the whole mesh has a leading axis with one entry per device, in mesh order; a per-rank
function sees it without that axis. Only the shards of this process's devices are read back, so the
same code serves one process and several.
"""

import contextlib
import hashlib
import math
import weakref
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cases
import jax_ep
from jax_ep.formats import QUANTIZED as QUANTIZED_FORMATS
from jax_ep.group import select
from jax_ep.nodes.connection import NodesConnection

AXIS = "ep"

_FASTEST_FIRST = select._FASTEST_FIRST
_BY_NODES_FIRST = sorted(_FASTEST_FIRST, key=lambda each: not issubclass(each, NodesConnection))


@contextlib.contextmanager
def each_node_by_itself(is_so: bool = True):
    """Groups opened meanwhile serve each node by itself, even where all could be served at once.

    In all processes alike. Inside of another such context, `is_so=False` undoes it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "_FASTEST_FIRST", _BY_NODES_FIRST if is_so else _FASTEST_FIRST)
        yield


def make_mesh(n_ranks: int, dp: int = 1, *, names=None, reverse=False) -> Mesh:
    """An ("ep",) mesh, or ("dp", "ep") if `dp` > 1; skips the test if devices are missing.

    With `names`, every axis but "ep" has size 2. In a job of several processes, a mesh must have
    the devices of all of them.
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

    There, XLA crashes on any custom call, even `jnp.linalg.cholesky`, next to an empty operand of
    `shard_map`.
    """
    if case.n_tokens == 0 and jax.__version_info__[:2] == (0, 11):
        pytest.skip("XLA of jax 0.11 crashes on custom calls next to empty operands")


def skip_rows_of_no_vectors(case, transport: str) -> None:
    """Skips cases whose rows `p2p` refuses: their bytes are no multiple of 16."""
    if transport not in ("p2p", "nvshmem") or case.token_format == "plain":
        return
    row_bytes = case.hidden_size // (2 if case.token_format.endswith("fp4") else 1)
    if row_bytes % 16:
        pytest.skip(f"transport p2p: a row must be a multiple of 16 bytes, has {row_bytes}")


def succeed_in_callbacks() -> None:
    """Makes a callback on every device, so that JAX forgets one that has failed there."""
    mesh = Mesh(np.array(jax.local_devices()), (AXIS,))

    def call(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(np.asarray, shape, x)

    mapped = jax.shard_map(call, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    jax.block_until_ready(jax.jit(mapped)(jnp.zeros(mesh.size)))


def coordinates(mesh: Mesh) -> list[tuple[int, int]]:
    """(replica, rank) of each device, in mesh order."""
    axis = mesh.axis_names.index(AXIS)
    ranks = np.indices(mesh.devices.shape)[axis].ravel()
    seen = [0] * mesh.shape[AXIS]
    result = []
    for rank in ranks:
        result.append((seen[rank], int(rank)))
        seen[rank] += 1
    return result


def n_replicas(mesh: Mesh) -> int:
    """Number of expert-parallel groups in the mesh."""
    return mesh.size // mesh.shape[AXIS]


class SharedJit:
    """A jitted function over a mesh; functions that lower to the same text are compiled once.

    Compiling takes most of the suite's time, and many tests have programs in common. JAX's own
    cache cannot serve here: with jax 0.10, a CPU program that was read from it may deadlock in
    XLA's collectives if it has several independent ones.
    """

    _programs: ClassVar[dict] = {}  # the most recently used
    _instances: ClassVar[weakref.WeakSet] = weakref.WeakSet()

    def __init__(self, mesh: Mesh, fn, **jit_options) -> None:
        self._instances.add(self)
        self._mesh, self._options = mesh, tuple(jit_options.items())
        self._jitted = jax.jit(fn, **jit_options)
        self._compiled = {}  # by the types of the operands
        self.lower, self.trace = self._jitted.lower, self._jitted.trace

    def __call__(self, *operands):
        leaves, treedef = jax.tree.flatten(operands)
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            return self._jitted(*operands)
        key = (treedef, *((x.shape, x.dtype) for x in leaves))
        if key not in self._compiled:
            self._compiled[key] = self.compile(*operands)
        return self._compiled[key](*operands)

    def compile(self, *operands) -> jax.stages.Compiled:
        """The compiled program for operands of these types."""
        lowered = self._jitted.lower(*operands)
        digest = hashlib.sha256(lowered.as_text().encode()).digest()
        key = (digest, self._mesh, self._options, lowered.in_tree, lowered.out_tree)
        compiled = self._programs.pop(key, None) or lowered.compile()
        self._programs[key] = compiled
        if len(self._programs) > 50:
            del self._programs[next(iter(self._programs))]
        return compiled

    @classmethod
    def forget_programs(cls) -> None:
        """Frees all compiled programs; those that are still wanted are compiled again."""
        cls._programs.clear()
        for instance in cls._instances:
            instance._compiled.clear()


def on_mesh(mesh: Mesh, fn, *, check_vma: bool = True, **jit_options) -> SharedJit:
    """Jits a per-rank function over the mesh."""
    return SharedJit(mesh, on_mesh_eager(mesh, fn, check_vma=check_vma), **jit_options)


def on_mesh_eager(mesh: Mesh, fn, *, check_vma: bool = True):
    """Maps a per-rank function over the mesh, without jit."""

    def body(*args):
        args = jax.tree.map(lambda x: x[0], args)
        return jax.tree.map(lambda x: x[None], fn(*args))

    spec = P(mesh.axis_names)
    return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)


def put_replicas(mesh: Mesh, arrays) -> jax.Array:
    """Puts `arrays[replica][rank]` on the device with that coordinate."""
    stacked = np.stack([arrays[replica][rank] for replica, rank in coordinates(mesh)])
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    return jax.make_array_from_callback(stacked.shape, sharding, lambda index: stacked[index])


def put(mesh: Mesh, *arrays) -> list[jax.Array]:
    """Puts each of `arrays`, indexed by rank, on a mesh of one replica."""
    return [put_replicas(mesh, [array]) for array in arrays]


def shards(mesh: Mesh, tree):
    """Yields ((replica, rank), that rank's arrays) for each device of this process."""
    leaves, treedef = jax.tree.flatten(tree)
    by_device = [{s.device: s for s in leaf.addressable_shards} for leaf in leaves]
    where = coordinates(mesh)
    for i, device in enumerate(mesh.devices.flat):
        if device in by_device[0]:
            local = [_entry(shards_of[device], i) for shards_of in by_device]
            yield where[i], jax.tree.unflatten(treedef, local)


def _entry(shard, i: int) -> np.ndarray:
    """Entry `i` of an array, from the shard that holds it; each device holds an empty one whole."""
    return np.asarray(shard.data)[i - (shard.index[0].start or 0)]


def skip_by_nodes() -> None:
    """Skips tests of totals that are others where each node is served by itself."""
    if cases.N_NODES > 1:
        pytest.skip("test_nodes.py tests what ranks count with --n-nodes")


def format_of(case) -> jax_ep.TokenFormat:
    """The token format of a case."""
    if case.token_format in QUANTIZED_FORMATS:
        layout = [case.scales_layout] if case.scales_layout else []
        return QUANTIZED_FORMATS[case.token_format](*layout)
    dtype = jnp.dtype(case.token_dtype)
    return jax_ep.BF16() if dtype == jnp.bfloat16 else jax_ep.Plain(dtype)


def config_of(case, **changes) -> jax_ep.EPConfig:
    """The `EPConfig` of a case; on CPUs with --n-nodes, skips those whose nodes span processes."""
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu and cases.N_NODES > 1 and case.n_nodes % jax.process_count():
        pytest.skip(f"needs nodes inside of processes, has {case.n_nodes}")
    fields = {
        "n_experts": case.n_experts,
        "top_k": case.top_k,
        "hidden_size": case.hidden_size,
        "max_tokens_per_rank": case.max_tokens,
        "token_format": format_of(case),
        "combine_dtype": jnp.dtype(case.combine_dtype),
        "recv_capacity": case.recv_capacity,
        "row_alignment": case.row_alignment,
        "n_nodes": case.n_nodes,
    } | case.flags
    return jax_ep.EPConfig(**(fields | changes))


def group_of(case, transport: str, mesh: Mesh | None = None, **changes) -> jax_ep.EPGroup:
    """An open group for a case, by default on a mesh of one replica."""
    mesh = make_mesh(case.n_ranks) if mesh is None else mesh
    return jax_ep.ep_init(mesh, AXIS, config_of(case, **changes), transport)


def float32_group(mesh: Mesh, transport: str, axis=AXIS, **fields) -> jax_ep.EPGroup:
    """An open group with float32 tokens and sums, unless `fields` say otherwise."""
    defaults = {"token_format": jax_ep.Plain(jnp.float32), "combine_dtype": jnp.float32}
    return jax_ep.ep_init(mesh, axis, jax_ep.EPConfig(**defaults | fields), transport)


def bits(array) -> np.ndarray:
    """The array's bytes as unsigned integers of its elements' size."""
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def assert_same_bits(actual, expected, what: str) -> None:
    """Compares shape, dtype and every bit; the error names the first element that differs."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype=} {expected.dtype=}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape=} {expected.shape=}"
    actual, expected = np.atleast_1d(actual), np.atleast_1d(expected)
    wrong = bits(actual) != bits(expected)
    if wrong.any():
        first = tuple(int(i[0]) for i in np.nonzero(wrong))
        raise AssertionError(
            f"{what}: {wrong.sum()} of {wrong.size} elements differ; the first is at {first}: "
            f"got {actual[first]}, expected {expected[first]}"
        )


def assert_trees_equal(mesh: Mesh, actual, expected, what: str) -> None:
    """Compares two trees of arrays of the mesh bitwise."""
    pairs = zip(shards(mesh, actual), shards(mesh, expected), strict=True)
    for (where, one), (_, other) in pairs:
        leaves = zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True)
        for (path, got), wanted in leaves:
            assert_same_bits(got, wanted, f"{what}{jax.tree_util.keystr(path)}, {where}")


def params(cases) -> list:
    """Pytest parameters with the cases' names; slow cases, and those with copies, are marked."""

    def marks(case) -> list:
        on_gpus = pytest.mark.xla_collectives  # counts of choices travel by them
        return [pytest.mark.slow] * case.slow + [on_gpus] * (case.expert_copies > 0)

    return [pytest.param(case, id=case.name, marks=marks(case)) for case in cases]
