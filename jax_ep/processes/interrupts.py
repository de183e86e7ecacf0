"""Ctrl-C at safe points only: a step that opens a group is never cut in two."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

# The contexts entered and not left, the innermost last. Only the main thread handles signals.
_active: list["deferred"] = []


class deferred:  # noqa: N801 (used like a function)
    """Holds back SIGINT until `check` is called, `allowed` is entered, or the block ends.

    Does nothing in other threads than the main one, which get no interrupts, and where Python does
    not handle the signal.
    """

    def __init__(self) -> None:
        self.handler: Callable[[int, FrameType | None], Any] | None = None
        self.has_come = False

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            self.handler = handler
            signal.signal(signal.SIGINT, self.record)
            _active.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        if self.handler is not None:
            _active.remove(self)
            signal.signal(signal.SIGINT, self.handler)
            self.deliver()

    def record(self, number: int, frame: FrameType | None) -> None:
        """The handler meanwhile."""
        self.has_come = True

    def deliver(self) -> None:
        """Handles an interrupt that has come: by default, raises KeyboardInterrupt."""
        if self.has_come and self.handler is not None:
            self.has_come = False
            self.handler(signal.SIGINT, None)


def check() -> None:
    """A safe point: raises KeyboardInterrupt if an interrupt was held back."""
    if _active and threading.current_thread() is threading.main_thread():
        _active[-1].deliver()


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """Interrupts raise at once, around calls that may wait for long and hold nothing."""
    if not _active or threading.current_thread() is not threading.main_thread():
        yield
        return
    inner = _active[-1]
    signal.signal(signal.SIGINT, inner.handler)
    try:
        inner.deliver()
        yield
    finally:
        signal.signal(signal.SIGINT, inner.record)
