"""EPGroup: a geometry, and the connection that a transport opened for it."""

import os
from typing import Any, Self

import jax
import numpy as np

from jax_ep.config import EPConfig
from jax_ep.exchange.base import Calls
from jax_ep.exchange.checks import check_manual
from jax_ep.geometry import Geometry, check_mesh
from jax_ep.group import dropped
from jax_ep.group.drop_watch import DropWatch
from jax_ep.group.select import connect
from jax_ep.processes import interrupts
from jax_ep.processes.exchange import Exchange, ExchangeFn, facts_of
from jax_ep.stats import RankStats
from jax_ep.transports.base import Connection


class EPGroup:
    """An expert-parallel group: static and hashable; jitted functions close over it.

    Made by `ep_init`. Groups made with equal arguments are equal. One group serves many layers, and
    several groups may be open at once. As a context manager, it closes itself. Unpickling calls
    `ep_init` with the same mesh, on devices with the same ids, axis, config, transport and
    `memory_of`; also if the pickled group was closed. An `exchange` is not pickled.
    """

    def __init__(self, connection: Connection) -> None:
        """Use `ep_init`."""
        self._connection = connection
        self._process = os.getpid()
        self._closed = False
        self._drops = DropWatch(connection)
        self._forget = dropped.watch(self, connection)

    @property
    def geometry(self) -> Geometry:
        """Mesh, ranks and sizes."""
        return self._connection.calls.geometry

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh that the group was made with."""
        return self.geometry.mesh

    @property
    def axis_name(self) -> str | tuple[str, ...]:
        """The mesh axis along which ranks are counted; a tuple if there are several."""
        return self.geometry.axis_name

    @property
    def config(self) -> EPConfig:
        """The static parameters."""
        return self.geometry.config

    @property
    def n_ranks(self) -> int:
        """Ranks of the group (R): the size of the mesh axis, or the product of several."""
        return self.geometry.n_ranks

    @property
    def n_local_experts(self) -> int:
        """Experts per rank (L)."""
        return self.geometry.n_local_experts

    @property
    def max_recv_tokens(self) -> int:
        """Rows of the output of dispatch (C)."""
        return self.geometry.max_recv_tokens

    @property
    def transport(self) -> str:
        """Name of the transport: `"xla"`, `"host"`, `"p2p"` or `"nvshmem"`."""
        return self.geometry.transport

    @property
    def key(self) -> str:
        """Names the group in compiled programs; the same in every process."""
        return self.geometry.key

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each device of this process, in mesh order."""
        return tuple(each.rank for each in self.geometry.local_coordinates)

    @property
    def memory(self) -> int:
        """Bytes that the open group holds on each device, beside the arrays of its calls.

        On `p2p`, the workspace that peers write to, which grows with R, M, K and H. On `nvshmem`,
        also the heap that other nodes write to. Groups that share them, as equal ones do, each say
        the bytes of the whole, so count these once. 0 on `xla` and `host`.

        Raises:
            ValueError: the group is closed.
        """
        self._check_open()
        return self._connection.memory()

    @property
    def dev_ptrs(self) -> np.ndarray:
        """Addresses of the communication buffers of this process's devices.

        `uint64[n_local_devices, 2, 3]`: (dispatch, combine) x (send, recv, recv_count);
        0 for buffers that the transport does not have. `xla` and `host` have none.
        """
        return self._connection.dev_ptrs()

    def stats(self) -> list[RankStats]:
        """Totals since the group was opened, one entry per device of this process.

        Equal groups that are open at the same time share them; on `p2p` and `nvshmem`, so do groups
        that share memory. Counts no running calls: first wait for their results
        (`jax.block_until_ready`). If rows were dropped, logs a warning (logger `jax_ep`), once per
        group; a thread does so once a minute, and the program when it ends.

        Raises:
            NotImplementedError: the transport keeps no totals (`xla`).
            ValueError: the group is closed.
        """
        self._check_open()
        stats = self._connection.stats()
        self._drops.warn_of(stats)
        return stats

    def check(self) -> None:
        """Raises if an earlier call failed on a device of this process.

        Needed for `p2p` and `nvshmem`, whose kernels can time out but not raise: a failed call
        leaves no rows (`row_offsets` of 0) or NaN, and the next call of the group raises. This
        raises at once; wait for the results first (`jax.block_until_ready`). On the other
        transports the failed call raises.

        Raises:
            jax.errors.JaxRuntimeError: a call failed, of this group or of one that shares its
                memory; the message names both ranks, the call and its epoch. Close the group, and
                those that share its memory, and make new ones.
            ValueError: the group is closed.
        """
        self._check_open()
        self._connection.check()

    def close(self) -> None:
        """Frees what the group holds. Later calls of the group raise an error.

        Calls that were enqueued before complete first, or fail. `host` waits for every array of
        this process that is being computed on CPUs. If for longer than `timeout_s` no such array
        and no call of the group is completed, it warns; then calls that have not started raise. So
        do calls whose results the program has dropped. `p2p` and `nvshmem` wait for what has been
        launched on the process's devices; calls that XLA launches later raise, so first wait for
        the results (`jax.block_until_ready`). All processes of a group must close it; each waits at
        most 10 s for the others, or 16 s on `nvshmem`. Buffers that CUDA graphs refer to are kept
        for the next equal group. Memory that other groups use (`memory_of`) stays until the last of
        them is closed, in any order. Warns of dropped rows like `stats`, for the calls that are
        complete. In a fork of the process that opened the group, frees nothing.
        """
        if not self._closed:
            self._closed = True
            self._forget()
            if os.getpid() != self._process:  # the threads of its calls are in the parent
                return
            try:
                self._drops.end()
            finally:
                self._connection.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"Group {self.key} is closed. Make a new one with ep_init.")

    def __reduce__(self) -> Any:
        mesh = self.mesh
        ids = self.geometry.device_ids
        axes = mesh.devices.shape, mesh.axis_names, mesh.axis_types
        arguments = self.axis_name, self.config, self.transport
        memory_of = self.geometry.memory_of
        memory_config = memory_of and memory_of.config
        return _open_pickled, (mesh.devices.flat[0].platform, ids, axes, arguments, memory_config)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EPGroup) and self.geometry == other.geometry

    def __hash__(self) -> int:
        return hash(self.geometry)

    def __repr__(self) -> str:
        return (
            f"EPGroup({self.key}, transport={self.transport!r}, axis_name={self.axis_name!r}, "
            f"n_ranks={self.n_ranks}{', closed' if self._closed else ''})"
        )


def _open_pickled(
    platform: Any, ids: Any, axes: Any, arguments: Any, memory_config: EPConfig | None
) -> EPGroup:
    """The group of a pickle; `memory_config` is that of the group whose memory it uses."""
    try:
        by_id = {device.id: device for device in jax.devices(platform)}
        devices = [by_id.pop(each) for each in ids]  # each once
        shape, names, types = axes
        mesh = jax.sharding.Mesh(np.array(devices).reshape(shape), names, axis_types=types)
        axis_name, config, transport = arguments
    except Exception as error:  # whatever damaged data raises
        raise ValueError(
            "A pickled EPGroup must hold the platform, the device ids and the axes of a mesh that "
            f"this program can make, and the arguments of ep_init; got {platform!r}, {ids!r}, "
            f"{axes!r} and {arguments!r}. Unpickle it where JAX has these devices, or make a group "
            "for this machine's with ep_init."
        ) from error
    if memory_config is None:
        return ep_init(mesh, axis_name, config, transport)
    with ep_init(mesh, axis_name, memory_config, transport) as memory_of:
        return ep_init(mesh, axis_name, config, transport, memory_of=memory_of)


def check_group(operation: str, group: EPGroup) -> str:
    """Requires an open group, and a `jax.shard_map` over its mesh; returns the call's name."""
    check_is_group(f"{operation}: group", group)
    if group.closed:
        raise ValueError(f"{operation}: group {group.key} is closed. Make a new one with ep_init.")
    if os.getpid() != group._process:
        raise ValueError(
            f"{operation}: group {group.key} must be used in the process that opened it; this one "
            "is a fork, which has none of JAX's threads. Start processes that use JAX by spawn."
        )
    check_manual(operation, group.geometry)
    return group.geometry.call(operation)


def calls_of(group: EPGroup) -> Calls:
    """What the group does inside traced functions."""
    return group._connection.calls


def check_is_group(name: str, group: Any) -> None:
    """Requires a group, open or closed."""
    if not isinstance(group, EPGroup):
        raise TypeError(f"{name} must be an EPGroup made by ep_init; got {type(group).__name__}.")


def ep_init(
    mesh: jax.sharding.Mesh,
    axis_name: str | tuple[str, ...],
    config: EPConfig,
    transport: str = "auto",
    exchange: ExchangeFn | None = None,
    memory_of: EPGroup | None = None,
) -> EPGroup:
    """Sets up expert parallelism along one or more mesh axes.

    Every process that holds devices of the mesh must call it with the same arguments. Processes
    that share groups must open them in the same order, and close them in the same order. Logs a
    warning (logger `jax_ep`) about each group, on another transport than `xla`, that the program
    has dropped without closing it.

    Args:
        mesh: devices. Each replica, the devices along `axis_name` at one index of the other axes,
            is an expert-parallel group of its own.
        axis_name: the axis along which experts are spread, or a tuple of several axes, such as
            `("context", "expert")`. Ranks are then counted along all of them, the last varying
            fastest, as `jax.lax.axis_index` and `jax.P` count; so rank r's experts are shard r of
            `jax.P(axis_name)`.
        config: the static parameters.
        transport: `"auto"` takes the fastest that can serve, and logs which one that is and what
            kept faster ones out (logger `jax_ep`, level INFO; WARNING if GPUs are left with
            `"xla"`, or CPUs because the extension is missing). `"host"`: CPU devices, each replica,
            or each node (`config.n_nodes`), in one process; `"p2p"`: CUDA devices, in any number of
            processes, those of each replica, or node, on one host and in reach of each other;
            `"xla"`: plain `jax.lax` collectives, everywhere. `"nvshmem"`: `p2p` inside each node
            and NVSHMEM between them, one process per GPU; never taken by `"auto"`.
        exchange: how processes send each other their buffers' addresses, in place of JAX's
            distributed runtime: `exchange(key, payload)` gets a `str` and at most 1 MiB of `bytes`
            and returns the payloads of all processes that hold devices of the mesh, unchanged, in
            order of process index: a list or tuple of `bytes`, `bytearray` or `memoryview`. Equal
            calls of `ep_init` and `close` make the same calls of it in all processes, with the same
            keys, each of which is used once. It must raise rather than wait forever for a process
            that does not call. Without JAX's runtime, a process that fails on its own, or is
            interrupted, cannot tell the others (docs/multi_host.md).
        memory_of: an open group of the same mesh and axis, whose memory (`EPGroup.memory`) the new
            group uses in place of memory of its own, on the same transport. The memory is freed
            once all groups that use it are closed. The new group needs the same `n_experts`,
            `expert_copies`, `fused_shared_expert`, `skip_a2a`, nodes and `timeout_s`, and at most
            the `top_k`, the `max_tokens_per_rank` and the bytes per token and row of the group
            that the memory was set up for; all else may differ, and results have the same bits. A
            call that fails fails all groups in the memory. The rules are the same on `xla` and
            `host`, which hold none.

    Returns:
        The group, for functions under `jax.shard_map` to close over.

    Raises:
        TypeError: `mesh` is not a mesh, `config` not an `EPConfig`, `exchange` not a function or
            returns something other than bytes, or `memory_of` not an `EPGroup`.
        ValueError: a device is in the mesh twice, the config does not fit the mesh or the memory of
            `memory_of`, the transport cannot serve it, or `memory_of` is closed; the message says
            why. Or a process opens another group: all raise it at once, and it says what differs.
        RuntimeError: in some process the buffers could not be set up, or an equal group, or one in
            the same memory, is open and has failed; all processes raise it, naming process and
            reason. So they do if a process is interrupted. Or the system refused a thread that
            `host` needs.
        TimeoutError: a process did not call within `config.timeout_s`; one that calls later raises
            it at once. If it is raised, or any other error, the group is open in no process, and
            `ep_init` may be called again.

    Warns:
        RuntimeWarning: once per process: the transport is `host`, and XLA has too few threads for
            programs to run ahead of their results (docs/sharp_bits.md).
    """
    connection = None
    dropped.warn()
    try:
        with interrupts.deferred():
            check_mesh(mesh)
            if not isinstance(config, EPConfig):
                raise TypeError(f"config must be an EPConfig; got {type(config).__name__}.")
            if not hasattr(config, "n_experts"):
                raise ValueError(
                    "config must have a field 'n_experts'; this EPConfig has none. Was it "
                    "unpickled from damaged data?"
                )
            if exchange is not None and not callable(exchange):
                raise TypeError(
                    f"exchange must be a function or None; got {type(exchange).__name__}."
                )
            memory = _memory_of(memory_of)
            if memory is not None and transport == "auto":
                transport = memory.transport
            requested = Geometry(mesh, axis_name, config, transport, memory_of=memory)
            facts = facts_of(requested)
            processes = Exchange.over(mesh, requested.key, config.timeout_s, exchange, facts)
            connection = connect(requested, processes)
        return EPGroup(connection)
    except BaseException as error:
        if connection is not None:  # interrupted
            processes.give_up(error)
            with interrupts.deferred():
                connection.abandon()
        raise


def _memory_of(group: Any) -> Geometry | None:
    """The geometry that the memory of an open group was set up for."""
    if group is None:
        return None
    check_is_group("memory_of", group)
    if group.closed:
        raise ValueError(
            f"memory_of must be open; group {group.key} is closed. Pass any open group that uses "
            "the memory."
        )
    return group.geometry.memory_of or group.geometry
