"""The kernel clock: times of kernels on the GPUs, from JAX's profiler."""

import collections
import dataclasses
import itertools
import pathlib
import re
import tempfile
from collections.abc import Callable

import jax
import numpy as np

from timing import Call

# Patterns of the names of the package's kernels. Few tokens have kernels of their own.
KERNELS = {
    "dispatch": re.compile("Dispatch(LL)?Kernel"),
    "combine": re.compile("Combine(LL)?Kernel"),
}

_N_CALLS = 5


class TraceError(RuntimeError):
    """A trace lacks the expected kernels."""


@dataclasses.dataclass(frozen=True)
class Event:
    """A kernel, or a copy, on one GPU."""

    name: str
    start_ns: float
    seconds: float


def kernel_seconds(traced: list[list[Event]], operation: str, n: int) -> np.ndarray:
    """Returns `[calls of all GPUs, n]`: the times of an operation's `n` kernels in each call."""
    kernel = KERNELS[operation]
    times = [[e.seconds for e in events if kernel.search(e.name)] for events in traced]
    found = {len(each) for each in times}
    if found != {_N_CALLS * n}:
        names = sorted({event.name for events in traced for event in events})
        words = f"{_N_CALLS * n} times {kernel.pattern} on each GPU; got {found}"
        raise TraceError(f"the trace must show {words}, and the names {names}.")
    return np.reshape(times, (-1, n))


def other_seconds(traced: list[list[Event]]) -> list[float]:
    """Returns, for each GPU, the time per call of the kernels that are not the package's."""
    return [sum(e.seconds for e in events if not _is_ours(e)) / _N_CALLS for events in traced]


def chain_seconds(traced: list[list[Event]], n: int) -> dict[str, np.ndarray]:
    """Returns, by operation, `[calls of all GPUs, n - 1]`: kernels in chains of `n` round trips.

    Leaves out the first step of each call, which waits for the GPU that starts last.
    """
    return {operation: kernel_seconds(traced, operation, n)[:, 1:] for operation in KERNELS}


def gaps(traced: list[list[Event]], n: int) -> tuple[list[float], dict[str, float]]:
    """Finds the gaps in chains of `n` round trips.

    Returns:
        The seconds from the end of each kernel of the package to the start of the next one in the
        same call, on all GPUs; and how many other kernels start per gap, by name.
    """
    for operation in KERNELS:
        kernel_seconds(traced, operation, n)  # refuses a trace that lacks kernels
    seconds: list[float] = []
    others: collections.Counter[str] = collections.Counter()
    for events in traced:
        ours = [i for i, event in enumerate(events) if _is_ours(event)]
        for k, (i, j) in enumerate(itertools.pairwise(ours), 1):
            if k % (2 * n):  # both are of the same call
                ns = events[j].start_ns - events[i].start_ns
                seconds.append(ns * 1e-9 - events[i].seconds)
                others.update(event.name for event in events[i + 1 : j])
    return seconds, {name: count / len(seconds) for name, count in others.items()}


def _is_ours(event: Event) -> bool:
    return any(kernel.search(event.name) for kernel in KERNELS.values())


def trace(call: Call, flush: Callable[[], None] | None) -> list[list[Event]]:
    """Traces `_N_CALLS` calls, each after `flush`; returns each GPU's events by start time."""
    function, args = call
    jax.block_until_ready([function(*args) for _ in range(2)])  # loads kernels
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = options.host_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(_N_CALLS):
                if flush is not None:
                    flush()
                jax.block_until_ready(function(*args))
        paths = pathlib.Path(folder).rglob("*.xplane.pb")
        profiles = [jax.profiler.ProfileData.from_file(str(path)) for path in paths]
        traced = [events for profile in profiles for events in read(profile)]
    if not traced:
        raise TraceError("the profiler's trace shows no GPU.")
    return traced


def read(profile: jax.profiler.ProfileData) -> list[list[Event]]:
    """Returns each GPU's events: the lines of its streams, without lines that summarize them."""
    planes = [plane for plane in profile.planes if plane.name.startswith("/device:GPU:")]
    traced = []
    for plane in sorted(planes, key=lambda plane: plane.name):
        streams = [line for line in plane.lines if line.name.startswith("Stream")]
        events = (event for stream in streams for event in stream.events)
        found = [Event(e.name, e.start_ns, e.duration_ns * 1e-9) for e in events]
        traced.append(sorted(found, key=lambda event: event.start_ns))
    return traced
