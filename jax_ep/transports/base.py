"""Connection: what a transport opens for a group."""

import abc
from typing import ClassVar

import numpy as np

from jax_ep.exchange.base import Calls
from jax_ep.geometry import Geometry
from jax_ep.processes.exchange import Exchange
from jax_ep.stats import RankStats


class Connection(abc.ABC):
    """What connects the ranks of a group, from `open` to `close`.

    Attributes:
        geometry: of the ranks that it connects: between nodes, those of a node.
        calls: what it does inside traced functions, for all ranks of the group.
    """

    name: ClassVar[str]
    calls: Calls

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    @classmethod
    @abc.abstractmethod
    def unsupported_reason(cls, geometry: Geometry, exchange: Exchange) -> str | None:
        """Why the transport cannot serve the group, the same in all processes; None if it can."""

    def open(self, exchange: Exchange) -> None:  # noqa: B027
        """Sets up what calls need; by default nothing.

        With `geometry.memory_of`, in the memory of that group, which is open.
        """

    def close(self) -> None:  # noqa: B027
        """Frees what `open` set up."""

    def abandon(self) -> None:
        """Undoes `open` in an `ep_init` that fails; by default closes."""
        self.close()

    def check(self) -> None:  # noqa: B027
        """`EPGroup.check`; by default calls raise by themselves."""

    def stats(self) -> list[RankStats]:
        """`EPGroup.stats`."""
        raise NotImplementedError(f"Transport {self.name!r} keeps no totals.")

    def memory(self) -> int:
        """`EPGroup.memory`."""
        return 0

    def dev_ptrs(self) -> np.ndarray:
        """`EPGroup.dev_ptrs`."""
        return np.zeros((len(self.geometry.local_coordinates), 2, 3), np.uint64)


def platform_problem(geometry: Geometry, wanted: str, shown: str) -> str | None:
    """Why a transport for one platform cannot serve the mesh; None if it can."""
    found = sorted({device.platform for device in geometry.mesh.devices.flat})
    fits = found == [wanted]
    return None if fits else f"it serves {shown} devices; the mesh has {', '.join(found)}."
