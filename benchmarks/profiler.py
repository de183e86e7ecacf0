"""The kernel clock: times of kernels on the GPUs, from JAX's profiler."""

import dataclasses
import pathlib
import tempfile
from collections.abc import Callable

import jax
import numpy as np

from timing import Call

# In the names of the package's kernels.
KERNELS = {"dispatch": "DispatchKernel", "combine": "CombineKernel"}

_N_CALLS = 5


class TraceError(RuntimeError):
    """A trace does not show what it must."""


@dataclasses.dataclass(frozen=True)
class Event:
    """A kernel, or a copy, on one GPU."""

    name: str
    start_ns: float
    seconds: float


def kernel_seconds(traced: list[list[Event]], operation: str, n: int) -> np.ndarray:
    """`[calls of all GPUs, n]`: of the package's `n` kernels in each call, in order."""
    kernel = KERNELS[operation]
    times = [[e.seconds for e in events if kernel in e.name] for events in traced]
    found = {len(some) for some in times}
    if found != {_N_CALLS * n}:
        names = sorted({event.name for events in traced for event in events})
        words = f"{_N_CALLS * n} times {kernel} on each GPU; got {found}"
        raise TraceError(f"the trace must show {words}, and the names {names}.")
    return np.reshape(times, (-1, n))


def other_seconds(traced: list[list[Event]]) -> list[float]:
    """Of all kernels in a call that are not the package's; of each GPU."""
    ours = tuple(KERNELS.values())
    return [
        sum(e.seconds for e in events if not any(k in e.name for k in ours)) / _N_CALLS
        for events in traced
    ]


def trace(call: Call, flush: Callable[[], None] | None) -> list[list[Event]]:
    """Events of each GPU in several calls, each after a `flush`, in order of time."""
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
    """Events of each GPU. Its plane has a line per stream; other lines sum these up."""
    traced = []
    for plane in sorted(profile.planes, key=lambda plane: plane.name):
        if plane.name.startswith("/device:GPU:"):
            events = [
                Event(event.name, event.start_ns, event.duration_ns * 1e-9)
                for line in plane.lines
                if line.name.startswith("Stream")
                for event in line.events
            ]
            traced.append(sorted(events, key=lambda event: event.start_ns))
    return traced
