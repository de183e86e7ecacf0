"""Makes the extension's allocations, or its creation of threads, fail: see failing_calls.cc."""

import contextlib
import ctypes
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Iterator

from jax_ep.ffi import extension

_SOURCE = pathlib.Path(__file__).with_name("failing_calls.cc")


def load() -> ctypes.CDLL:
    """Compiles and loads the library, and lets it intercept the extension's calls."""
    extension.load_host()
    compiler = os.environ.get("CXX", "c++")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "failing_calls.so")
        options = ["-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
        # A sanitizer's runtime is not meant for the compiler.
        environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
        subprocess.run([compiler, *options, _SOURCE, "-o", path], check=True, env=environment)
        library = ctypes.CDLL(str(path))
    for kind in ("Allocations", "Threads"):
        getattr(library, f"FailingCallsSet{kind}").argtypes = [ctypes.c_int64, ctypes.c_int]
        getattr(library, f"FailingCallsCount{kind}").restype = ctypes.c_int64
    assert library.FailingCallsInstall() > 0, "the extension imports no function to intercept"
    return library


class Failing:
    """Calls of the extension that fail, in `with` statements."""

    def __init__(self) -> None:
        self._library = load()

    @contextlib.contextmanager
    def allocation(self, number: int, *, and_later: bool = False) -> Iterator[None]:
        """The allocation of that number fails, counted from 1, and all later ones if asked for.

        0: none fails; they are counted.
        """
        self._library.FailingCallsSetAllocations(number, and_later)
        try:
            yield
        finally:
            self._library.FailingCallsStop()

    @contextlib.contextmanager
    def thread(self, number: int, *, and_later: bool = False) -> Iterator[None]:
        """Creation `number` of a thread fails, from 1, and later ones if `and_later`."""
        self._library.FailingCallsSetThreads(number, and_later)
        try:
            yield
        finally:
            self._library.FailingCallsStop()

    @property
    def n_allocations(self) -> int:
        """Allocations that the extension asked for in the last `with` statement."""
        return self._library.FailingCallsCountAllocations()

    @property
    def n_threads(self) -> int:
        """Threads that the extension asked for in the last `with` statement."""
        return self._library.FailingCallsCountThreads()
