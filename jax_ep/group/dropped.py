"""A warning about groups that a program dropped without closing them."""

import collections
import contextlib
import logging
import weakref
from collections.abc import Callable
from typing import Any

from jax_ep.transports.base import Connection

_log = logging.getLogger("jax_ep")
_open: collections.Counter[str] = collections.Counter()  # groups that the program has, by key
_dropped: collections.deque[Connection] = collections.deque()


def watch(group: Any, connection: Connection) -> Callable[[], Any]:
    """Lets `warn` name the group once the program has dropped it, unless the result is called."""
    key = connection.geometry.key
    _open[key] += 1

    def drop() -> None:
        _open[key] -= 1
        _dropped.append(connection)

    end = weakref.finalize(group, drop)
    end.atexit = False

    def forget() -> None:
        if end.detach():
            _open[key] -= 1

    return forget


def warn() -> None:
    """Names groups that are open although nothing refers to them any more.

    Closes none: compiled programs may call them, and other processes refer to theirs. Not as soon
    as a group is dropped, when the program may be about to end.
    """
    while _dropped:
        try:
            connection = _dropped.popleft()
        except IndexError:  # another thread has taken it
            return
        key = connection.geometry.key
        if connection.name == "xla" or _open[key]:  # holds nothing, or serves an equal group
            continue
        with contextlib.suppress(RuntimeError, ValueError):  # an interrupt has closed it
            n_bytes = connection.memory()
            held = f" and holds {n_bytes} bytes on each device" if n_bytes else ""
            _log.warning(
                f"Group {key} is still open{held}, although nothing refers to it any more. Call "
                "close() before you assign another group to its name."
            )
