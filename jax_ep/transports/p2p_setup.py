"""The buffers of `p2p`: all processes of a group open and close them together."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jax_ep import _cuda_ffi
from jax_ep._extension import why_missing
from jax_ep.exchange import Exchange
from jax_ep.topology import Place, exchange_places, local_places, places

if TYPE_CHECKING:
    from jax_ep.group import EPGroup

# A peer that does not close a group, as it is dead perhaps, is not awaited for longer.
_LONGEST_CLOSE_S = 10.0


def ordinal(place: Place) -> int:
    """CUDA's number of a device of this process, by which handlers know it.

    Processes that see different devices use the same numbers for them.
    """
    return place.device.local_hardware_id


def why_not(here: Sequence[Place], exchange: Exchange) -> str | None:
    """What keeps the processes from connecting their devices; None if nothing does.

    `here` are the places of this process. All processes get the same answer.
    """
    if not here:
        return "this process holds no device of the mesh."
    host, reason = _here(here)
    if exchange.is_alone:
        return reason
    records = exchange("choice", json.dumps([host, reason]).encode())
    answers = dict(zip(exchange.processes, map(json.loads, records), strict=True))
    for process, (_, reason) in answers.items():
        if reason is not None:
            return f"process {process}: {reason}"
    first, *others = answers
    for process in others:
        if answers[process][0] != answers[first][0]:
            return (
                f"process {process} is on another host than process {first}; use "
                "transport='xla'."
            )
    return None


def _here(here: Sequence[Place]) -> tuple[str, str | None]:
    """Which host this is, and what keeps this process from taking part."""
    try:
        extension = _cuda_ffi.load()
    except ImportError as error:
        return "", why_missing("_ffi_cuda", error)
    reason = extension.why_no_peer_access([ordinal(place) for place in here])
    return extension.host_identity(), reason or None


def open_buffers(group: EPGroup, exchange: Exchange, **sizes: Any) -> None:
    """Allocates the workspaces of this process, and connects them with all others.

    Raises:
        RuntimeError: a step failed in some process; all raise it.
        TimeoutError: a process did not come.
    """
    extension, key = _cuda_ffi.load(), group.key
    here = exchange_places(group, local_places(group.mesh, group.axis_name))
    devices = [(ordinal(place), place.row, place.rank) for place in here]

    def allocate() -> bytes:
        return b"".join(extension.allocate_group(key=key, devices=devices, **sizes))

    def connect() -> bytes:
        extension.connect_group(key, list(_peers(group, exchange, payloads)))
        return b""

    try:
        payloads = exchange.gather("workspaces", allocate)
    except BaseException:
        if disconnect(key):
            extension.free_group(key)
        raise
    try:
        exchange.gather("connected", connect)
    except BaseException:
        if disconnect(key):
            free_buffers(key, exchange)
        raise


def _peers(
    group: EPGroup, exchange: Exchange, payloads: Sequence[bytes]
) -> Iterator[tuple[int, int, bytes]]:
    """(row, rank, address) of every device; a payload holds those of one process."""
    everywhere = exchange_places(group, places(group.mesh, group.axis_name))
    for process, payload in zip(exchange.processes, payloads, strict=True):
        there = [p for p in everywhere if p.device.process_index == process]
        size = len(payload) // len(there)
        for i, place in enumerate(there):
            yield place.row, place.rank, payload[i * size : (i + 1) * size]


def disconnect(key: str) -> bool:
    """Counts one user less; True: that was the last, `free_buffers` comes next."""
    return _cuda_ffi.load().disconnect_group(key)


def free_buffers(key: str, exchange: Exchange) -> None:
    """Frees the workspaces.

    Before that, it waits for a while until no other process writes to them any more.
    What CUDA graphs refer to is kept, for an equal group that is opened later.
    """
    try:
        exchange("closed", b"closed", min(exchange.timeout_s, _LONGEST_CLOSE_S))
    except Exception as error:
        warnings.warn(
            f"Group {key} is closed here, and perhaps not in another process, which "
            f"must not call it any more: {error}",
            RuntimeWarning,
            stacklevel=4,
        )
    finally:
        _cuda_ffi.load().free_group(key)
