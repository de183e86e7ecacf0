"""The wall clock and the period in a chain. Samples of several functions interleave.

* Wall time: of a lone jitted call, until its results are ready.
* Period in a chain: the time of a long chain minus that of a short one, divided by the difference
  of their lengths. Costs that do not depend on the length (launch, first and last step) cancel.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

_IDLE_S = 5e-3
_MAX_WAIT_S = 2.0
_MIN_SAMPLES = 3

# A compiled function and its arguments.
Call = tuple[Callable[..., Any], tuple]


@dataclasses.dataclass(frozen=True)
class Repeats:
    """How often and in what way functions are timed."""

    max_samples: int  # of each function
    # Time limit of each function, after `_MIN_SAMPLES`; None where processes must take as many.
    seconds: float | None
    n_queued: int = 1  # calls enqueued in one sample
    pause_s: float = 0.0  # before each sample, so that the GPU cools down


def wall(calls: dict[str, Call], repeats: Repeats) -> dict[str, list[float]]:
    """Returns samples of each call's wall time in seconds, by name."""
    samplers = {n: lambda c=call: _seconds(c, repeats) for n, call in calls.items()}
    return _interleave(samplers, repeats)


def period(
    chains: dict[str, tuple[Call, Call]], lengths: tuple[int, int], repeats: Repeats
) -> dict[str, list[float]]:
    """Returns samples of the seconds per step, by name, from pairs of a short and a long chain."""

    def sample(short: Call, long: Call) -> float:
        few, many = (_seconds(call, repeats) for call in (short, long))
        return (many - few) / (lengths[1] - lengths[0])

    samplers = {name: lambda p=pair: sample(*p) for name, pair in chains.items()}
    return _interleave(samplers, repeats)


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Returns median and quartiles in microseconds, and the number of samples."""
    numbers = np.percentile(values, [50, 25, 75]) * 1e6
    return {"us": [float(f"{us:.5g}") for us in numbers], "n": len(values)}


def _interleave(
    samplers: dict[str, Callable[[], float]], repeats: Repeats
) -> dict[str, list[float]]:
    """Takes a sample of each in turn, so that noise affects all equally; the first one rotates."""
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    spent = dict.fromkeys(samplers, 0.0)
    for sampler in samplers.values():
        sampler()  # warms up

    def wants_more(name: str) -> bool:
        n = len(samples[name])
        is_slow = repeats.seconds is not None and spent[name] >= repeats.seconds
        return n < (min(_MIN_SAMPLES, repeats.max_samples) if is_slow else repeats.max_samples)

    turn = 0
    while waiting := [name for name in samplers if wants_more(name)]:
        first = turn % len(waiting)
        for name in waiting[first:] + waiting[:first]:
            start = time.monotonic()
            samples[name].append(samplers[name]())
            spent[name] += time.monotonic() - start
        turn += 1
    return samples


def _seconds(call: Call, repeats: Repeats) -> float:
    """Returns the time of one call; freeing its results is not timed."""
    function, args = call
    if jax.default_backend() == "cpu":
        _wait_until_idle()
    time.sleep(repeats.pause_s)
    start = time.perf_counter()
    results = [function(*args) for _ in range(repeats.n_queued)]
    jax.block_until_ready(results)
    seconds = time.perf_counter() - start
    del results
    return seconds / repeats.n_queued


def _wait_until_idle() -> None:
    """Waits until the previous call has freed its memory.

    XLA reports results before it has freed temporary arrays. Unmapping hundreds of megabytes takes
    tens of milliseconds, which would be added to the next function's time.
    """
    deadline = time.monotonic() + _MAX_WAIT_S
    busy = True
    while busy and time.monotonic() < deadline:
        before = time.process_time()
        time.sleep(_IDLE_S)
        busy = time.process_time() - before > _IDLE_S / 10
