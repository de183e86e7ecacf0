"""EPGroup: the ranks along a mesh axis, their configuration and their transport."""

from __future__ import annotations

import hashlib
from types import TracebackType

import jax
import numpy as np

from jax_ep import transports
from jax_ep.config import EPConfig
from jax_ep.exchange import Exchange, ExchangeFn
from jax_ep.stats import RankStats
from jax_ep.topology import local_places


class EPGroup:
    """An expert-parallel group: static, hashable, closed over by jitted functions.

    Made by `ep_init`. Groups made with equal arguments are equal. One group serves many
    layers; several groups live side by side. A context manager that closes the group.
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        axis_name: str,
        config: EPConfig,
        transport: transports.Transport,
        exchange: Exchange,
    ) -> None:
        """Use `ep_init`."""
        self._mesh = mesh
        self._axis_name = axis_name
        self._config = config
        self._transport = transport
        self._n_ranks = mesh.shape[axis_name]
        self._n_local_experts = config.n_local_experts(self._n_ranks)
        self._max_recv_tokens = config.max_recv_tokens(self._n_ranks)
        self._routed = config.routed(self._n_ranks)
        self._key = _group_key(mesh, axis_name, config, transport.name)
        self._closed = False
        transport.open(self, exchange)

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh that the group was made with."""
        return self._mesh

    @property
    def axis_name(self) -> str:
        """The mesh axis along which ranks are counted."""
        return self._axis_name

    @property
    def config(self) -> EPConfig:
        """The static parameters."""
        return self._config

    @property
    def n_ranks(self) -> int:
        """Ranks of the group (R): the size of the mesh axis."""
        return self._n_ranks

    @property
    def n_local_experts(self) -> int:
        """Experts per rank (L)."""
        return self._n_local_experts

    @property
    def max_recv_tokens(self) -> int:
        """Rows of the output of dispatch (C)."""
        return self._max_recv_tokens

    @property
    def transport(self) -> str:
        """Name of the transport: `"xla"`, `"host"` or `"p2p"`."""
        return self._transport.name

    @property
    def key(self) -> str:
        """Names the group in attributes: the same in every process that makes it."""
        return self._key

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each device of this process, in the order of the mesh."""
        return tuple(place.rank for place in local_places(self._mesh, self._axis_name))

    @property
    def dev_ptrs(self) -> np.ndarray:
        """Addresses of the communication buffers of this process's devices.

        `uint64[n_local_devices, 2, 3]`: (dispatch, combine) x (send, recv, recv_count);
        0 where the transport has no such buffer, as `xla` and `host` have none.
        """
        return self._transport.dev_ptrs(self)

    def stats(self) -> list[RankStats]:
        """Totals since the group was opened, one per device of this process.

        Equal groups that are open at the same time share them.

        Waits for no call: to count those that were started, wait for their results
        first (`jax.block_until_ready`).

        Raises:
            NotImplementedError: the transport keeps no totals (`xla`).
            ValueError: the group is closed.
        """
        self._check_open()
        return self._transport.stats(self)

    def check(self) -> None:
        """Raises what a call of the group failed of, on a device of this process.

        For `p2p`, whose kernels end a wait but cannot raise: a call that failed leaves
        no rows (`row_offsets` of 0) or NaN, and the next call of the group raises. This
        tells at once; wait for the results first (`jax.block_until_ready`). The other
        transports raise by themselves.

        Raises:
            jax.errors.JaxRuntimeError: a call failed; the message names both ranks, the
                call and its epoch. Close the group, and make a new one.
            ValueError: the group is closed.
        """
        self._check_open()
        self._transport.check(self)

    def close(self) -> None:
        """Frees what the group holds. Later calls of the group raise an error.

        On `host` so do calls that a jitted function has begun and that have not run
        yet: wait for its results before (`jax.block_until_ready`). `p2p` waits itself.
        All its processes close a group; each waits for the others, but not for long.
        Buffers that CUDA graphs refer to stay, for the next group that is equal.
        """
        if not self._closed:
            self._closed = True
            self._transport.close(self)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"Group {self._key} is closed. Make a new one by ep_init.")

    def __copy__(self) -> EPGroup:
        return self

    def __deepcopy__(self, memo: dict) -> EPGroup:
        return self

    def __enter__(self) -> EPGroup:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EPGroup) and (self._key, self._mesh) == (
            other._key,
            other._mesh,
        )

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return (
            f"EPGroup({self._key}, transport={self.transport!r}, "
            f"axis_name={self._axis_name!r}, n_ranks={self._n_ranks}"
            f"{', closed' if self._closed else ''})"
        )


def ep_init(
    mesh: jax.sharding.Mesh,
    axis_name: str,
    config: EPConfig,
    transport: str = "auto",
    exchange: ExchangeFn | None = None,
) -> EPGroup:
    """Sets up expert parallelism along a mesh axis.

    Every process that holds devices of the mesh calls it with the same arguments. Such
    processes open the same groups, and close them, in the same order.

    Args:
        mesh: devices; each row along `axis_name` is a group of ranks of its own.
        axis_name: the axis along which experts are spread.
        config: the static parameters.
        transport: `"auto"` takes the fastest that can serve; `"host"`: the CPU devices
            of one process; `"p2p"`: the CUDA devices of one host that reach each other,
            in one process or several; `"xla"`: plain `jax.lax` collectives, everywhere.
        exchange: how processes tell each other their buffers' addresses, instead of
            JAX's distributed runtime: `exchange(key, payload)` gives the payloads of
            all processes that hold devices of the mesh, in order of process index. It
            must raise, not wait forever, where one does not come.

    Returns:
        The group, to be closed over by functions under `jax.shard_map`.

    Raises:
        TypeError: `mesh` is no mesh, or `config` no `EPConfig`.
        ValueError: the mesh and the config do not fit each other, or the transport
            cannot serve this mesh; the message says why.
        RuntimeError: the buffers cannot be set up in some process, or an equal group is
            open there, and has failed; the message says which, and why. All processes
            raise it.
        TimeoutError: a process did not call within `config.timeout_s`.
    """
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh; got {type(mesh).__name__}.")
    if not isinstance(config, EPConfig):
        raise TypeError(f"config must be an EPConfig; got {type(config).__name__}.")
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"axis_name must be an axis of the mesh; got {axis_name!r}, the mesh has "
            f"{mesh.axis_names}."
        )
    n_ranks = mesh.shape[axis_name]
    config.n_local_experts(n_ranks)
    config.max_recv_tokens(n_ranks)
    config.nodes(n_ranks)
    name = _group_key(mesh, axis_name, config, transport)
    processes = Exchange.over(mesh, name, config.timeout_s, exchange)
    chosen = transports.choose(transport, mesh, axis_name, config, processes)
    return EPGroup(mesh, axis_name, config, chosen, processes)


def _group_key(
    mesh: jax.sharding.Mesh, axis_name: str, config: EPConfig, transport: str
) -> str:
    """Equal on all processes and machines with the same device ids, config and axis.

    It stands in executables that outlive the process: nothing that differs between two
    runs of one program may be in it.
    """
    device_ids = [device.id for device in mesh.devices.flat]
    facts = (tuple(mesh.shape.items()), device_ids, axis_name, config, transport)
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
    return f"{transport}-ep{mesh.shape[axis_name]}-{digest}"
