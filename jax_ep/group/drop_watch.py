"""Warns of rows that the calls of open groups drop: while the program runs, and when it ends.

No call waits for its device to check this. A thread reads the totals once a minute.
"""

import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence

from jax_ep.geometry import Geometry
from jax_ep.stats import RankStats, describe_drops
from jax_ep.transports.base import Connection

_log = logging.getLogger("jax_ep")
interval_s = 60.0  # tests change it
stop_s = 5.0  # how long others wait for a check, whose device may hang
_lock = threading.RLock()  # no group is closed during a check; a handler of the log may close one
_watched: list["DropWatch"] = []
_ends = threading.Event()
_threads: list[threading.Thread] = []
_process = os.getpid()  # a fork has none of the threads, and perhaps a lock that none releases


@contextlib.contextmanager
def _without_checks() -> Iterator[bool]:
    """Whether no check of the thread runs meanwhile; one that does not end stops nobody."""
    is_free = _lock.acquire(timeout=stop_s)
    try:
        yield is_free
    finally:
        if is_free:
            _lock.release()


class DropWatch:
    """Warns once (logger `jax_ep`) if rows are dropped, until `end`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._has_warned = False
        if os.getpid() != _process:
            return
        with _without_checks():
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
        except (NotImplementedError, RuntimeError, ValueError):  # no totals, or a failed device
            return

    def end(self) -> None:
        """The last check, before the connection is closed."""
        with _without_checks() as is_free:
            if self in _watched:
                _watched.remove(self)
            if is_free:
                self.check()


def _start_thread() -> None:
    thread = threading.Thread(target=_watch, name="jax_ep drops", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the system refuses one; `_at_exit` warns
        return
    _threads.append(thread)


def _watch() -> None:
    while not _ends.wait(interval_s):
        _check_all()


def _check_all() -> None:
    with _lock:
        by_key = {each.geometry.key: each for each in _watched}  # equal ones share totals
        for each in by_key.values():
            each.check()


@atexit.register
def _at_exit() -> None:
    """Before JAX's backends end, as jax is imported, and its functions registered, earlier."""
    if os.getpid() != _process:
        return
    _ends.set()
    with _without_checks() as is_free:
        if is_free:
            _check_all()
