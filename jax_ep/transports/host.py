"""Transport `host`: CPU devices, by XLA FFI handlers in C++.

Devices that exchange tokens must be of one process.
"""

import functools
import time
import warnings
from typing import Any

import jax

from jax_ep.exchange.calls import exchange_bytes
from jax_ep.exchange.rules import CustomCalls
from jax_ep.ffi import extension
from jax_ep.geometry import Geometry
from jax_ep.processes.exchange import Exchange
from jax_ep.stats import RankStats
from jax_ep.transports import cpu_threads
from jax_ep.transports.base import Connection, platform_problem

# Frames from a warning to the user's code.
_LEVEL_OF_EP_INIT_CALL = 4  # open, connect, ep_init
_LEVEL_OF_CLOSE_CALL = 5  # _warn_of_pending_results, _wait_for_results, close, EPGroup.close

_MIN_POLL_S, _MAX_POLL_S = 1e-3, 0.1
_GRACE_S = 1.0  # for a program to end whose call has timed out


class HostConnection(Connection):
    """C++ handlers on CPU devices."""

    name = "host"

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)
        self.calls = HostCalls(geometry)

    @classmethod
    def unsupported_reason(cls, geometry: Geometry, exchange: Exchange) -> str | None:
        """Requires CPU devices, each replica in one process, and the extension."""
        reason = platform_problem(geometry, "cpu", "CPU")
        if reason is not None:
            return reason
        for replica in geometry.routed_replicas:
            if len({each.device.process_index for each in replica}) > 1:
                return f"all {geometry.peers} must belong to one process; use transport='xla'."
        step = "intra-node choice of host" if geometry.intra_node else "choice of host"
        return exchange.agree(step, _why_not_loaded())

    def open(self, exchange: Exchange) -> None:
        """Registers the handlers and tells them which device is which rank."""
        geometry = self.geometry
        config, routed = geometry.config, geometry.routed
        devices = geometry.routed_coordinates(geometry.local_coordinates)
        advice = cpu_threads.how_to_run_ahead(geometry.mesh)
        if advice:
            cpu_threads.warn_once(advice, stacklevel=_LEVEL_OF_EP_INIT_CALL)
        extension.register_host()
        extension.load_host().open_group(
            key=geometry.key,
            n_ranks=routed.n_ranks,
            n_ranks_per_node=routed.n_ranks_per_node,
            n_source_nodes=routed.n_source_nodes,
            n_groups=routed.n_groups,
            n_choices=routed.n_choices,
            hidden_size=config.hidden_size,
            max_tokens_per_rank=geometry.max_routed_tokens,
            max_recv_tokens=geometry.max_recv_tokens,
            row_alignment=config.group_alignment,
            token_bytes=config.token_format.token_bytes(config.hidden_size),
            timeout_s=config.timeout_s,
            late_hint=f" Did the program run ahead of its results? {advice}" if advice else "",
            devices=[(each.device.id, each.replica, each.rank) for each in devices],
        )

    def close(self) -> None:
        """Closes the group in the extension, once calls that were enqueued before have ended."""
        try:
            self._wait_for_results()
        finally:
            extension.load_host().close_group(self.geometry.key)

    def abandon(self) -> None:
        """Closes the group in the extension; nobody has called it."""
        extension.load_host().close_group(self.geometry.key)

    def _wait_for_results(self) -> None:
        """Waits for all arrays on CPUs that are being computed, as long as there is progress.

        XLA may have yet to start the programs that compute them, on some devices or on all. A call
        that waits for a rank ends within `timeout_s`, but programs may wait for something else.
        """
        pending = [x for x in jax.live_arrays("cpu") if not _is_ready(x)]
        progress, waited = None, 0.0
        while pending:
            calls = [each.dispatch_calls + each.combine_calls for each in self.stats()]
            before, progress = progress, (len(pending), sum(calls))
            if progress != before:
                waited = 0.0
            if waited > self.geometry.config.timeout_s + _GRACE_S:
                return self._warn_of_pending_results(waited)
            waited += _sleep(min(max(waited / 10, _MIN_POLL_S), _MAX_POLL_S))
            pending = [x for x in pending if not _is_ready(x)]

    def _warn_of_pending_results(self, seconds: float) -> None:
        warnings.warn(
            f"Group {self.geometry.key} is closed although results that were enqueued before are "
            f"still being computed: for {seconds:.0f} s, none was completed and no call of the "
            "group. Calls that have not started yet will raise an error.",
            RuntimeWarning,
            stacklevel=_LEVEL_OF_CLOSE_CALL,
        )

    def stats(self) -> list[RankStats]:
        """`EPGroup.stats`."""
        geometry, load = self.geometry, extension.load_host()
        routed = geometry.routed_coordinates(geometry.local_coordinates)
        counts = [load.stats(geometry.key, each.replica, each.rank) for each in routed]
        return RankStats.of_devices(geometry, counts)


class HostCalls(CustomCalls):
    """Custom calls, also for what the library shares besides tokens."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry, functools.partial(_handle_shape, geometry), 1, are_async=False)
        self.may_loop = not geometry.config.skip_a2a

    def all_gather(self, x: jax.Array) -> jax.Array:
        """One custom call; with `skip_a2a`, where ranks do not meet, XLA's."""
        if self.geometry.config.skip_a2a:
            return super().all_gather(x)
        return exchange_bytes(self.geometry, x, splits=False)

    def all_to_all(self, x: jax.Array) -> jax.Array:
        """As `all_gather`."""
        if self.geometry.config.skip_a2a:
            return super().all_to_all(x)
        return exchange_bytes(self.geometry, x, splits=True)


def _handle_shape(geometry: Geometry, n_tokens: int) -> tuple[int, ...]:
    """`dst_rows`, `[T, N]`: each choice's row at its destination, -1 = none."""
    return (n_tokens, geometry.routed.n_choices)


def _why_not_loaded() -> str | None:
    """Why this process has no handlers; None if it has."""
    try:
        extension.load_host()
    except ImportError as error:
        return extension.why_missing("_ffi", error)
    return None


def _sleep(seconds: float) -> float:
    """Sleeps; returns how long, but at most twice as long as asked for.

    If the whole process is paused (a debugger, SIGSTOP), what it waits for is, too.
    """
    begin = time.monotonic()
    time.sleep(seconds)
    return min(time.monotonic() - begin, 2 * seconds)


def _is_ready(x: Any) -> bool:
    """Whether a live array is there, failed or deleted."""
    try:
        return x.is_ready()
    except RuntimeError:  # another thread has deleted it
        return True
