"""Warns of rows that the calls of open groups drop: while the program runs, and when it ends.

No call waits for its device to check this. A thread reads the totals once a minute.
"""

import atexit
import logging
import os
import threading
from collections.abc import Sequence

from jax_ep.geometry import Geometry
from jax_ep.stats import RankStats, describe_drops
from jax_ep.transports.base import Connection

_log = logging.getLogger("jax_ep")
interval_s = 60.0  # tests change it
stop_s = 5.0  # how long others wait for the thread's checks, in which a device may hang
_watched: list["DropWatch"] = []
_ends = threading.Event()
_is_idle = threading.Event()  # the thread checks nothing; no lock, which Ctrl-C could leave taken
_is_idle.set()
_threads: list[threading.Thread] = []
_process = os.getpid()  # a fork has none of the threads


class DropWatch:
    """Warns once (logger `jax_ep`) if rows are dropped, until `end`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._has_warned = False
        if os.getpid() != _process:
            return
        _watched.append(self)
        if not _threads:
            _start_thread()

    @property
    def geometry(self) -> Geometry:
        """That of the group."""
        return self._connection.calls.geometry

    def warn_of(self, stats: Sequence[RankStats]) -> None:
        """Warns of drops in the totals, if this is the first time."""
        text = None if self._has_warned else describe_drops(self.geometry, stats)
        if text is not None:
            self._has_warned = True
            _log.warning(text)

    def check(self) -> None:
        """Warns of drops, where they are counted and can be read."""
        if self._has_warned:
            return
        try:
            self.warn_of(self._connection.stats())
        # No totals, a failed device, or the wrong machine.
        except (ImportError, NotImplementedError, RuntimeError, ValueError):
            return

    def end(self) -> None:
        """The last check, before the connection is closed."""
        if self in _watched:
            _watched.remove(self)
        if _waited():
            self.check()


def _waited() -> bool:
    """Whether the thread's checks have ended, so that one may close what they read."""
    # The thread itself: a handler of its warning may close a group.
    return threading.current_thread() in _threads or _is_idle.wait(stop_s)


def _start_thread() -> None:
    thread = threading.Thread(target=_watch, name="jax_ep drops", daemon=True)
    _threads.append(thread)
    try:
        thread.start()
    except RuntimeError:  # the system refuses one; `_at_exit` warns
        _threads.remove(thread)


def _watch() -> None:
    while not _ends.wait(interval_s):
        _is_idle.clear()  # before it looks which groups are watched: see `end`
        try:
            _check_all()
        finally:
            _is_idle.set()


def _check_all() -> None:
    by_key = {each.geometry.key: each for each in tuple(_watched)}  # equal ones share totals
    for each in by_key.values():
        each.check()


@atexit.register
def _at_exit() -> None:
    """Before JAX's backends end, as jax is imported, and its functions registered, earlier."""
    if os.getpid() != _process:
        return
    _ends.set()
    if _waited():
        _check_all()
