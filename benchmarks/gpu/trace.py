"""Times of what ran on the GPUs, from JAX's profiler."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

#: Between two calls that are to be told apart in a trace, and what tells them apart.
_PAUSE_S = 5e-3
_GAP_NS = 2e6


class TraceError(RuntimeError):
    """A trace does not show what it must."""


@dataclasses.dataclass(frozen=True)
class Event:
    """A kernel, or a copy, on one GPU."""

    name: str
    begin_ns: float
    end_ns: float

    @property
    def us(self) -> float:
        return (self.end_ns - self.begin_ns) * 1e-3


class Trace:
    """Events of each GPU in order of time; empty until the session has ended."""

    def __init__(self) -> None:
        self.events: list[list[Event]] = []

    def calls(self, n_calls: int) -> list[list[list[Event]]]:
        """Events by GPU and call; calls are what `pause` has separated.

        Raises:
            TraceError: there are no GPUs in the trace, or other than `n_calls` calls.
        """
        if not self.events:
            raise TraceError("the profiler's trace shows no GPU.")
        by_gpu = [_split(events) for events in self.events]
        found = [len(calls) for calls in by_gpu]
        if found != [n_calls] * len(found):
            raise TraceError(
                f"the profiler's trace must show {n_calls} calls on each GPU; got "
                f"{found}."
            )
        return by_gpu


@contextlib.contextmanager
def record() -> Iterator[Trace]:
    """A profiler session around the body."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 0
    trace = Trace()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            yield trace
        for path in pathlib.Path(folder).rglob("*.xplane.pb"):
            trace.events += read(jax.profiler.ProfileData.from_file(str(path)))


def calls_of(
    n_calls: int, run: Callable[[], None], n_tries: int = 3
) -> list[list[list[Event]]]:
    """Events of what `run` does, by GPU and call, as `Trace.calls` gives them.

    A host that is held up within a call makes it look like two: it is run again then.
    """
    with record() as session:
        run()
    try:
        return session.calls(n_calls)
    except TraceError:
        if n_tries <= 1:
            raise
    return calls_of(n_calls, run, n_tries - 1)


def pause() -> None:
    """Before each call that is to be told apart. The GPUs must be idle."""
    time.sleep(_PAUSE_S)


def read(profile: jax.profiler.ProfileData) -> list[list[Event]]:
    """Events of each GPU, in order of time."""
    planes = sorted(profile.planes, key=lambda plane: plane.name)
    return [_events(plane) for plane in planes if plane.name.startswith("/device:GPU:")]


def _events(plane: Any) -> list[Event]:
    """A GPU's plane has a line for each stream; other lines sum up what is there."""
    lines = list(plane.lines)
    events = [
        Event(event.name, event.start_ns, event.end_ns)
        for line in lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    if not events:
        names = [line.name for line in lines]
        raise TraceError(f"{plane.name} shows no stream's events; its lines: {names}")
    return sorted(events, key=lambda event: event.begin_ns)


def span_us(events: list[Event]) -> float:
    """From the first event's begin to the last one's end."""
    begin = min(event.begin_ns for event in events)
    return (max(event.end_ns for event in events) - begin) * 1e-3


def summary(values: list[float]) -> dict[str, float | int]:
    """Of microseconds."""
    low, middle, high = np.percentile(values, [0, 50, 100])
    return {
        "median_us": round(float(middle), 2),
        "min_us": round(float(low), 2),
        "max_us": round(float(high), 2),
        "n": len(values),
    }


def _split(events: list[Event]) -> list[list[Event]]:
    calls: list[list[Event]] = []
    end = -_GAP_NS
    for event in events:
        if event.begin_ns - end >= _GAP_NS:
            calls.append([])
        calls[-1].append(event)
        end = max(end, event.end_ns)
    return calls
