"""What can be tested of the GPU benchmark without GPUs.

The rivals' rows and sums, on virtual devices; how a trace is read; and a rehearsal of
the whole program, in which only the figures that need a GPU's trace are missing.
"""

import contextlib
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh

import jax_ep
from ranks import child_environment

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

from gpu import (  # noqa: E402
    clocks,
    figures,
    formats,
    lax_all_gather,
    main,
    measure,
    overlap,
    plan,
    trace,
)
from gpu.cases import Case, make_inputs, traffic  # noqa: E402
from gpu.child import Child  # noqa: E402

EFFORT = measure.Effort(repeats=2, n_sets=2, n_pairs=(1, 2), n_loop=2, n_queued=2)


def emulated_ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """`lax.ragged_all_to_all`, which XLA:CPU lacks, out of all_gathers."""
    rank, n_ranks = lax.axis_index(axis_name), lax.axis_size(axis_name)
    everyones = (operand, input_offsets, send_sizes, output_offsets)
    everyones = [lax.all_gather(x, axis_name) for x in everyones]
    for source in range(n_ranks):
        rows, starts, sizes, places = (x[source] for x in everyones)
        i = jnp.arange(output.shape[0]) - places[rank]
        is_sent = (i >= 0) & (i < sizes[rank])
        moved = rows[jnp.clip(starts[rank] + i, 0, rows.shape[0] - 1)]
        output = jnp.where(is_sent[:, None], moved, output)
    sizes = everyones[2][:, rank]
    return jnp.where((sizes == recv_sizes).all(), output, jnp.zeros_like(output))


@pytest.fixture
def arena(request, monkeypatch):
    """A case on 4 devices."""
    monkeypatch.setattr(lax, "ragged_all_to_all", emulated_ragged_all_to_all)
    devices = np.array(jax.devices("cpu")[:4])
    if len(devices) < 4:
        pytest.skip(f"needs 4 CPU devices, found {len(devices)}")
    mesh = Mesh(devices, ("ep",), axis_types=(AxisType.Auto,))
    case = Case(4, **{"hidden_size": 64, "n_experts": 16, "top_k": 4} | request.param)
    return measure.Arena(mesh, case, EFFORT)


@pytest.mark.parametrize(
    "arena",
    [{"n_tokens": 1}, {"n_tokens": 16, "routing": "zipf"}, {"n_tokens": 600}],
    indirect=True,
    ids=str,
)
@pytest.mark.parametrize("name", ["lax all_gather", "lax ragged_all_to_all", "jax_ep"])
def test_contestants_compute_the_contract(arena, name) -> None:
    assert measure.measure(arena, name, "host", [])["failed"] == []


@pytest.mark.parametrize("arena", [{"n_tokens": 16}], indirect=True, ids=str)
def test_a_wrong_row_is_noticed(arena, monkeypatch) -> None:
    right = lax_all_gather.dispatch

    def wrong(shapes, *args):
        received = right(shapes, *args)
        return received._replace(tokens=received.tokens.at[0, 0].multiply(2))

    monkeypatch.setattr(lax_all_gather, "dispatch", wrong)
    result = measure.measure(arena, "lax all_gather", "host", ["loop"])
    assert result["failed"] == ["check: lax all_gather: rows must equal the reference."]
    assert "pair_period" not in result


def test_traffic_counts_rows_and_remote_messages() -> None:
    case = Case(2, n_tokens=2, n_experts=8, top_k=2)
    ids = np.array([[0, 1], [0, 4], [4, 5], [0, 1]])  # 2 tokens on rank 0, 2 on rank 1
    found = traffic(case, ids)
    assert found == {"rows": 4, "rows_of_fullest_rank": 5, "remote_messages": 1}


def test_inputs_differ_by_seed_and_name_no_expert_twice() -> None:
    case = Case(4, n_tokens=8, hidden_size=64, routing="zipf")
    one, two = make_inputs(case, 0), make_inputs(case, 1)
    assert (one.topk_ids != two.topk_ids).any() and (one.tokens != two.tokens).any()
    assert all(len(set(row)) == case.top_k for row in one.topk_ids)
    assert np.isfinite(one.tokens.astype(np.float32)).all()
    np.testing.assert_allclose(one.topk_weights.sum(1), 1, rtol=1e-5)


EVENT = "events {{ metadata_id: 1 offset_ps: {} duration_ps: {} }}"
PLANE = """planes {{
    name: "{}"
    event_metadata {{ key: 1 value {{ id: 1 name: "void DispatchKernel(x)" }} }}
    lines {{ name: "Stream #7(Compute)" timestamp_ns: 100 {} }}
    lines {{ name: "XLA Ops" timestamp_ns: 100 {} }}
}}
"""


def test_a_trace_is_read_by_gpu_and_call() -> None:
    first = EVENT.format(10_000_000, 2_000_000)  # from 10 µs on, for 2 µs
    second = EVENT.format(13_000_000, 7_000_000)
    third = EVENT.format(5_000_000_000, 4_000_000)  # 5 ms later
    stream = first + second + third
    planes = [PLANE.format(f"/device:GPU:{i}", stream, first) for i in range(2)]
    planes.append(PLANE.format("/host:CPU", first, first))
    text = "".join(planes)
    profile = jax.profiler.ProfileData.from_serialized_xspace(
        jax.profiler.ProfileData.text_proto_to_serialized_xspace(text)
    )
    session = trace.Trace()
    session.events = trace.read(profile)
    calls = session.calls(2)
    times = [[[event.us for event in call] for call in gpu] for gpu in calls]
    assert times == [[[2, 7], [4]]] * 2
    assert trace.span_us(calls[0][0]) == 10
    assert "DispatchKernel" in calls[0][0][0].name
    with pytest.raises(trace.TraceError, match="must show 3 calls"):
        session.calls(3)


def test_a_call_that_looks_like_two_is_run_again(monkeypatch) -> None:
    events = [trace.Event("a", 0, 1), trace.Event("b", 5e6, 6e6)]
    sessions = [events, events[:1], events]
    runs = []

    @contextlib.contextmanager
    def record():
        session = trace.Trace()
        yield session
        session.events.append(sessions[len(runs) - 1])

    monkeypatch.setattr(trace, "record", record)
    assert trace.calls_of(1, lambda: runs.append(1)) == [[events[:1]]]
    assert len(runs) == 2
    sessions = [events] * 5
    with pytest.raises(trace.TraceError, match=r"must show 1 calls .* got \[2\]"):
        trace.calls_of(1, lambda: runs.append(1))
    assert len(runs) == 5


@pytest.fixture
def gpu_trace(monkeypatch):
    """A trace of what was run on 4 GPUs: behind each flush, two pairs of kernels."""

    @contextlib.contextmanager
    def record():
        n_pauses = 0

        def pause():
            nonlocal n_pauses
            n_pauses += 1

        monkeypatch.setattr(trace, "pause", pause)
        session = trace.Trace()
        yield session
        begins = [1e7 * i for i in range(n_pauses)]
        for gpu in range(4):
            events = []
            for begin in begins:
                for i, name in enumerate(("Dispatch", "Combine") * 2):
                    start = begin + 1e5 * i
                    end = start + 1e3 * (10 + 5 * i + gpu)
                    events.append(trace.Event(f"void {name}Kernel()", start, end))
                events.append(trace.Event("other", end + 1e3, end + 2e3))
            session.events.append(events)

    monkeypatch.setattr(trace, "record", record)


@pytest.mark.parametrize("arena", [{"n_tokens": 16}], indirect=True, ids=str)
@pytest.mark.parametrize("name", ["jax_ep", "jax_ep, row_weights"])
def test_kernels_and_periods_of_the_package(arena, gpu_trace, name) -> None:
    result = measure.measure(arena, name, "host", ["kernels", "period"])
    assert result["failed"] == []
    # Kernels take 10, 15, 20, 25 µs in turns on GPU 0, one more on each next. The first
    # dispatch does not count.
    assert result["dispatch"]["median_us"] == 21.5
    assert (
        result["combine"] | {"median_us": 21.5, "min_us": 15, "max_us": 28}
        == (result["combine"])
    )
    n_bytes = result["traffic"]["remote_messages"] * 64 * 2
    assert result["combine"]["physical_gb_s"] == round(n_bytes / 21.5e3, 1)
    assert result["other_kernels_per_call"] == 1
    overhead = (result["pair_period"]["median_us"] - 21.5 - 21.5) / 2
    assert result["overhead_us"] == pytest.approx(overhead, abs=0.01)


@pytest.mark.parametrize("arena", [{"n_tokens": 16}], indirect=True, ids=str)
def test_spans_of_a_rival(arena, gpu_trace) -> None:
    result = measure.measure(arena, "lax all_gather", "host", ["kernels", "loop"])
    assert result["failed"] == []
    for operation in ("dispatch", "combine"):  # to the end of "other", on GPU 0
        assert result[operation]["median_us"] == 300 + 25 + 2
        assert result[operation]["median_of_longest_us"] == 300 + 25 + 3 + 2
    assert result["pair_period"]["median_us"] > 0


@pytest.mark.parametrize(
    "arena", [{"n_tokens": 16, "hidden_size": 128}], indirect=True, ids=str
)
@pytest.mark.parametrize("name", formats.FORMATS)
def test_dispatch_in_a_format(arena, gpu_trace, name) -> None:
    result = formats.measure(arena, name, "host")
    assert result["failed"] == []
    assert result["dispatch"]["median_us"] == 21.5  # as above
    n_bytes = result["traffic"] = arena.traffic["remote_messages"]
    n_bytes *= result["message_bytes"]
    assert result["dispatch"]["physical_gb_s"] == round(round(n_bytes) / 21.5e3, 1)


@pytest.mark.parametrize(
    "arena", [{"n_tokens": 16, "hidden_size": 128}], indirect=True, ids=str
)
def test_a_format_whose_rows_are_wrong_is_noticed(arena, monkeypatch) -> None:
    right = jax_ep.dequantize
    monkeypatch.setattr(jax_ep, "dequantize", lambda *args: -right(*args))
    result = formats.measure(arena, "mxfp8", "host")
    assert "rows must be near the tokens" in result["failed"][0]


def test_bytes_of_a_message() -> None:
    """Scales to 16 bytes, payload, 8 choices of 16 bytes; to 128 bytes."""
    wanted = dict(
        bf16=14336 + 128,
        blockwise_fp8=224 + 7168 + 128 + 32,
        mxfp8=224 + 7168 + 128 + 32,
        mxfp4=224 + 3584 + 128 + 32,
        nvfp4=448 + 3584 + 128 + 64,
    )
    got = {
        name: formats.message_bytes(make(), 7168, 8)
        for name, make in formats.FORMATS.items()
    }
    assert got == wanted


@pytest.mark.parametrize("arena", [{"n_tokens": 16}], indirect=True, ids=str)
def test_calls_beside_a_layer(arena, gpu_trace) -> None:
    result = overlap.measure(arena, 4, "host", width=128)
    assert result["failed"] == []
    assert (result["n_sms"], result["dense_width"]) == (4, 128)
    for operation in ("dispatch", "combine"):
        got = result[operation]
        for periods in (got, got["burst"]):
            call, dense, both = (
                periods[f"{name}_us"] for name in ("call", "dense", "both")
            )
            hidden = (call + dense - both) / min(call, dense)
            assert periods["hidden"] == pytest.approx(hidden, abs=1e-3)
        # All traces show one other kernel: the layer would take no time beside a call.
        assert got["dense_slowdown"] == -1


def test_clocks_are_medians_of_all_gpus() -> None:
    lines = "1980, 300.00, Not Active\n1530, 720.00, Active\n1500, 700.0, Active\n19"
    assert clocks.summarise(lines) == {
        "sm_mhz": 1530,
        "watts": 700,
        "power_capped": pytest.approx(2 / 3),
    }
    assert clocks.summarise("No devices were found") is None


@pytest.mark.parametrize("arena", [{"n_tokens": 16}], indirect=True, ids=str)
def test_other_bits_of_a_call_beside_a_layer_are_noticed(arena, monkeypatch) -> None:
    wait = jax_ep.combine_wait
    monkeypatch.setattr(jax_ep, "combine_wait", lambda *a, **k: -wait(*a, **k))
    result = overlap.measure(arena, 4, "host", width=128)
    assert all("must give the same bits" in why for why in result["failed"])
    assert len(result["failed"]) == 2


CHILD = """
import json, sys, time
for answer in json.loads(sys.argv[2]):
    if answer == "hang":
        time.sleep(60)
    if answer == "crash":
        sys.exit(3)
    print("noise")
    print(json.dumps({"answer": answer}), flush=True)
"""


@pytest.mark.parametrize(
    ("end", "why"), [("hang", "not done after"), ("crash", "exit code 3")]
)
def test_a_process_that_hangs_or_crashes_is_lost(tmp_path, end, why, capfd) -> None:
    (tmp_path / "__main__.py").write_text(CHILD)
    with Child(tmp_path, [1, end, 2], {}) as child:
        assert child.next(20) == {"answer": 1} and not child.is_lost
        (reason,) = child.next(1)["failed"]
        assert why in reason and child.is_lost
    assert "noise" in capfd.readouterr().err


def test_behind_a_process_that_ends_the_rest_is_measured(tmp_path, monkeypatch) -> None:
    started = []

    class Flaky:
        """Crashes in "b"; says in "c" that it cannot go on."""

        def __init__(self, benchmarks, request, environment):
            self.names = [item["name"] for item in request["items"]]
            self.is_lost, self.is_new = False, True
            started.append(("".join(self.names), environment["XLA_FLAGS"]))

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def next(self, seconds):
            if self.is_new:
                self.is_new = False
                return {"device": "Some GPU", "n_devices": 4}
            name = self.names.pop(0)
            self.is_lost = name == "b"
            fatal = {"is_fatal": True} if name == "c" else {}
            return {"failed": ["exit code 3"] if self.is_lost else []} | fatal

    monkeypatch.setattr(main, "Child", Flaky)
    case = {"n_tokens": 128, "hidden_size": 7168, "routing": "uniform"}
    items = [plan.Item(name, "jax_ep", case) for name in "abcd"]
    monkeypatch.setattr(plan, "full", lambda: items)
    monkeypatch.setenv("XLA_FLAGS", "--some")
    assert main.main(["--out", str(tmp_path), "--commit", "abc"]) == 1
    assert started == [(names, "--some") for names in ("abcd", "cd", "d")]
    record = json.loads((tmp_path / "gpu_some-gpu-x4.json").read_text())
    assert [result["name"] for result in record["results"]] == ["a", "b", "c", "d"]
    assert record["machine"]["commit"] == "abc"
    assert figures.failures(record) == ["b: exit code 3"]


def run_benchmarks(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "error", *map(str, (BENCHMARKS, *arguments))],
        env=child_environment() | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_platform_is_what_jax_has_unless_told() -> None:
    names = [
        run_benchmarks(*options, "--list").stdout.splitlines()
        for options in ([], ["--platform", "cpu"], ["--platform", "gpu"])
    ]
    assert names[0] == names[1] and "T16-H256-uniform" in names[0]
    assert "T4096-H7168-uniform-lax all_gather" in names[2]


def test_rehearsal_lacks_only_what_a_gpu_shows(tmp_path) -> None:
    done = run_benchmarks("--platform", "gpu", "--rehearse", "--out", tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    record = json.loads((tmp_path / "gpu_cpu-x4.json").read_text())
    reasons = {why.split(": ", 1)[1] for why in figures.failures(record)}
    assert reasons == {
        f"{part}the profiler's trace shows no GPU."
        for part in ("kernels: ", "period: ", "")  # the last one of the formats
    }
    assert {part["token_format"] for part in record["formats"]} == set(formats.FORMATS)
    assert [set(part) >= {"dispatch", "combine"} for part in record["overlaps"]] == [
        True
    ]
    assert {result["who"] for result in record["results"]} == {
        "jax_ep",
        "jax_ep, row_weights",
        "lax all_gather",
    }
    assert all("pair_period" in result for result in record["results"])
    assert record["link"]["gb_s"] > 0
