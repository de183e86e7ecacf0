"""The benchmarks' item `calls`: gaps between kernels."""

import functools
import pathlib
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import calls  # noqa: E402
import profiler  # noqa: E402
import timing  # noqa: E402
from case import Case  # noqa: E402
from implementations import AXIS  # noqa: E402
from plan import Item  # noqa: E402

SIZES = {"hidden_size": 64, "n_experts": 16, "top_k": 4}
ITEM = Item("calls", "calls", chains={"round trip": (1, 2)}, repeats=timing.Repeats(2, 1.0))


def make_mesh(n: int) -> Mesh:
    devices = np.array(jax.devices("cpu")[:n])
    if len(devices) < n:
        pytest.skip(f"needs {n} CPU devices, found {len(devices)}")
    return Mesh(devices, (AXIS,), axis_types=(AxisType.Auto,))


def fake_trace(n_steps: int) -> list[list[profiler.Event]]:
    """5 calls on 2 GPUs. Kernels take 10 µs, those of first steps 50; gaps take 1 µs.

    In the gap after each dispatch another kernel runs, as before the first kernel of each call.
    """
    traced, ns = [], 0.0
    for _ in range(2):
        events: list[profiler.Event] = []
        traced.append(events)
        for _ in range(5):
            ns += 1e6
            events.append(profiler.Event("first", ns - 500, 1e-7))
            for step in range(n_steps):
                for name in ("DispatchLLKernel", "CombineKernel"):
                    us = 10 if step else 50
                    events.append(profiler.Event(f"void {name}(x)", ns, us * 1e-6))
                    ns += us * 1e3 + 1e3
                    if name[0] == "D":
                        events.append(profiler.Event("fusion", ns - 800, 2e-7))
    return traced


def test_gaps_are_those_between_kernels_of_the_same_call() -> None:
    seconds, others = profiler.gaps(fake_trace(3), 3)
    assert np.allclose(seconds, 1e-6, rtol=1e-3) and len(seconds) == 2 * 5 * 5
    assert others == {"fusion": 3 / 5}
    with pytest.raises(profiler.TraceError, match=r"must show 10 times .* got \{15\}"):
        profiler.gaps(fake_trace(3), 2)


def test_kernels_of_a_chain_leave_out_the_first_step() -> None:
    found = profiler.chain_seconds(fake_trace(3), 3)
    assert found.keys() == {"dispatch", "combine"}
    for seconds in found.values():
        assert seconds.shape == (10, 2) and np.allclose(seconds, 1e-5)


def measured(monkeypatch, item: Item, trace) -> dict[str, list]:
    """Returns the values of lines by key."""
    monkeypatch.setattr(calls, "_CASE", functools.partial(Case, **SIZES))
    monkeypatch.setattr(calls, "_TOKENS", (8,))
    monkeypatch.setattr(profiler, "trace", trace)
    found: dict[str, list] = {}
    for line in calls.measure(item, make_mesh(4), "host"):
        ((key, value),) = line.items()
        found.setdefault(key, []).append(value)
    return found


@pytest.mark.parametrize("variant", ["", "no command buffers"])
def test_calls_are_measured_with_and_without_command_buffers(monkeypatch, variant) -> None:
    item = Item(**vars(ITEM) | {"variant": variant})
    found = measured(monkeypatch, item, lambda call, flush: fake_trace(2))
    assert found.keys() == {"times", "gap_kernels"}
    by_variant: dict[str | None, dict[str, dict]] = {}
    for row in found["times"]:
        assert (row["case"], row["clock"]) == ("T8-H64-uniform", "gaps")
        by_variant.setdefault(row["variant"], {})[row["operation"]] = row
    assert by_variant.keys() == ({variant} if variant else {None, "traced without command buffers"})
    figures = by_variant[variant or None]
    assert [figures[name]["us"][0] for name in ("dispatch", "combine", "gap")] == [10, 10, 1]
    period, gap = (figures[name]["us"][0] for name in ("period", "gap by period"))
    assert gap == pytest.approx((period - 20) / 2, rel=1e-4, abs=0.01)
    assert all((row["name"], row["per_gap"]) == ("fusion", 2 / 3) for row in found["gap_kernels"])


@pytest.mark.thorough
def test_without_gpus_only_the_trace_is_missing(monkeypatch) -> None:
    found = measured(monkeypatch, ITEM, profiler.trace)
    assert all("shows no GPU" in why for why in found["not_measured"])
    assert [row["operation"] for row in found["times"]] == ["period"] * 2
