"""Transport `p2p`: CUDA kernels for GPUs that reach each other by loads and stores.

In any number of processes. Devices that exchange tokens must be on one host.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_ep.exchange.checks import VECTOR_BYTES
from jax_ep.exchange.rules import CustomCalls
from jax_ep.ffi import extension
from jax_ep.geometry import Geometry
from jax_ep.processes.exchange import Exchange
from jax_ep.stats import RankStats
from jax_ep.transports import workspaces
from jax_ep.transports.base import Connection, platform_problem

# Groups times groups per rank: kernels divide by multiplication (FastDivisor).
_MAX_PRODUCT = 2**32
# Choices of a token, one per lane of a warp.
_MAX_CHOICES = 32

# The exchange that opened the workspaces of each memory key. Equal groups share them, and so do
# groups with `memory_of`.
_exchanges: dict[str, Exchange] = {}


class P2pConnection(Connection):
    """CUDA kernels that store into the memory of the host's other GPUs."""

    name = "p2p"

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)
        self.calls = CustomCalls(
            geometry,
            functools.partial(_handle_shape, geometry),
            min_row_elements=VECTOR_BYTES // 4,
            max_row_bytes=workspaces.max_message_bytes(geometry.config),
            are_async=True,
            lends=True,
        )

    @classmethod
    def unsupported_reason(cls, geometry: Geometry, exchange: Exchange) -> str | None:
        """Requires CUDA devices, each replica on one host, sizes that fit, and the extension."""
        return (
            platform_problem(geometry, "gpu", "CUDA")
            or _unsupported_size(geometry)
            or workspaces.unsupported_reason(geometry, exchange)
        )

    def open(self, exchange: Exchange) -> None:
        """Allocates and connects the buffers, unless open ones have the memory key."""
        extension.register_cuda()
        exchange.gather("failures", self._require_no_failure)
        if workspaces.share_workspaces(self.geometry):
            return
        _exchanges[self.geometry.key] = exchange
        try:
            workspaces.open_workspaces(self.geometry, exchange)
        except BaseException:
            del _exchanges[self.geometry.key]
            raise

    def _require_no_failure(self) -> bytes:
        """Raises if the open workspaces that this group would use have failed or are missing."""
        key = self.geometry.memory_key
        if key not in _exchanges:
            if self.geometry.memory_of is not None:
                raise RuntimeError(f"the group of memory_of, {key}, is not open in this process.")
            return b""
        message = self._failure()
        if message:
            raise RuntimeError(
                f"an equal group, or one with the same memory, {key}, is open and has failed: "
                f"{message} Close it first, and all groups that use its memory."
            )
        return b""

    def _failure(self) -> str:
        """Why a call in this memory failed on one of this process's devices, or ''."""
        return next(filter(None, self._of_each_device(extension.load_cuda().failure)), "")

    def _of_each_device(self, look_up: Callable[[str, int], Any]) -> list[Any]:
        """`look_up(memory_key, ordinal)` for each device of this process, in mesh order."""
        ordinals = map(workspaces.ordinal, self.geometry.local_coordinates)
        return [look_up(self.geometry.memory_key, each) for each in ordinals]

    def close(self) -> None:
        """Frees the workspaces once no call uses them, unless other groups do."""
        if workspaces.disconnect(self.geometry.key):
            memory_key = self.geometry.memory_key
            workspaces.free_workspaces(memory_key, _exchanges.pop(memory_key))

    def check(self) -> None:
        """`EPGroup.check`."""
        message = self._failure()
        if message:
            raise jax.errors.JaxRuntimeError(f"Group {self.geometry.key}: {message}")

    def stats(self) -> list[RankStats]:
        """`EPGroup.stats`."""
        counts = self._of_each_device(extension.load_cuda().stats)
        return RankStats.of_devices(self.geometry, counts)

    def memory(self) -> int:
        """`EPGroup.memory`."""
        return max(self._of_each_device(extension.load_cuda().workspace_bytes))

    def dev_ptrs(self) -> np.ndarray:
        """`EPGroup.dev_ptrs`."""
        pointers = self._of_each_device(extension.load_cuda().dev_ptrs)
        return np.asarray(pointers, np.uint64).reshape(-1, 2, 3)


def _handle_shape(geometry: Geometry, n_tokens: int) -> tuple[int, ...]:
    """`message_rows`, `[R + R M (1 + N)]`, at the rows' rank.

    The number of messages from each source rank; then, for each message that may have arrived, its
    token and the row of each choice.
    """
    routed = geometry.routed
    n_messages = routed.n_ranks * geometry.max_routed_tokens
    return (routed.n_ranks + n_messages * (1 + routed.n_choices),)


def _unsupported_size(geometry: Geometry) -> str | None:
    config, routed = geometry.config, geometry.routed
    if routed.n_groups * routed.n_local_groups > _MAX_PRODUCT:
        return f"n_experts**2 / n_ranks must be at most 2**32; got {routed}."
    max_top_k = _MAX_CHOICES - int(config.fused_shared_expert)
    if config.top_k > max_top_k:
        return f"top_k must be at most {max_top_k}; got {config.top_k}."
    for row_bytes in workspaces.row_bytes(config):
        if row_bytes % VECTOR_BYTES:
            return f"a row must be a multiple of {VECTOR_BYTES} bytes; got {row_bytes}."
    return None
