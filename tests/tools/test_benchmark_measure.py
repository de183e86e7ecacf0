"""The benchmarks' measuring process: checks, clocks, traces."""

import dataclasses
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh

import jax_ep

sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import implementations  # noqa: E402
import measure  # noqa: E402
import profiler  # noqa: E402
import programs  # noqa: E402
import timing  # noqa: E402
from baselines import BASELINES  # noqa: E402
from case import ROUTINGS, Case, make_routing, remote_messages  # noqa: E402
from implementations import AT_COMBINE, AT_DISPATCH, AXIS, BALANCED, OURS  # noqa: E402
from plan import Item  # noqa: E402
from workload import Workload  # noqa: E402

SIZES = {"hidden_size": 64, "n_experts": 16, "top_k": 4}
CASE = Case(16, **SIZES)
CHAINS = {"round trip": (1, 2), "round trip + grad": (1, 2)}
REPEATS = timing.Repeats(max_samples=2, seconds=1.0)
ALL_GATHER = "lax all_gather"


def emulated_ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """`lax.ragged_all_to_all`, which XLA:CPU lacks, out of all_gathers."""
    rank, n_ranks = lax.axis_index(axis_name), lax.axis_size(axis_name)
    everyones = (operand, input_offsets, send_sizes, output_offsets)
    everyones = [lax.all_gather(x, axis_name) for x in everyones]
    for source in range(n_ranks):
        rows, starts, sizes, positions = (x[source] for x in everyones)
        i = jnp.arange(output.shape[0]) - positions[rank]
        is_sent = (i >= 0) & (i < sizes[rank])
        moved = rows[jnp.clip(starts[rank] + i, 0, rows.shape[0] - 1)]
        output = jnp.where(is_sent[:, None], moved, output)
    sizes = everyones[2][:, rank]
    return jnp.where((sizes == recv_sizes).all(), output, jnp.zeros_like(output))


@pytest.fixture
def mesh(monkeypatch):
    monkeypatch.setattr(lax, "ragged_all_to_all", emulated_ragged_all_to_all)
    devices = np.array(jax.devices("cpu")[:4])
    if len(devices) < 4:
        pytest.skip(f"needs 4 CPU devices, found {len(devices)}")
    return Mesh(devices, (AXIS,), axis_types=(AxisType.Auto,))


def measured(mesh, names, case=CASE, **options):
    """Returns figures by (implementation, operation, clock), and the failures."""
    options = {"repeats": REPEATS, **options}
    item = Item("some", case=case, implementations=tuple(names), **options)
    figures, failed = {}, []
    for line in measure.measure(item, mesh, "host"):
        if found := line.get("times"):
            figures[found["implementation"], found["operation"], found["clock"]] = found
        failed += [line["failed"]] if "failed" in line else []
    return figures, failed


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"n_tokens": 1},
        {"n_tokens": 16, "routing": "half_empty"},
        {"n_tokens": 600, "routing": "zipf", "capacity": 3.0},
    ],
    ids=str,
)
def test_implementations_compute_the_contract(mesh, options) -> None:
    names = (*OURS, *BASELINES)
    figures, failed = measured(mesh, names, Case(**SIZES | options), wall=True)
    assert failed == []
    assert {name for name, _, _ in figures} == set(names)


def test_all_gather_drops_what_does_not_fit(mesh) -> None:
    """The last rows, as the contract demands."""
    case = Case(64, **SIZES, routing="one_rank", capacity=1.5)
    chains = {"round trip": (1, 2)}
    figures, failed = measured(mesh, (AT_DISPATCH, ALL_GATHER), case, chains=chains)
    assert failed == [] and len(figures) == 2


def test_the_formulation_for_gpus_computes_the_contract(mesh, monkeypatch) -> None:
    monkeypatch.setattr(implementations, "on_gpu", lambda mesh: True)
    figures, failed = measured(mesh, (ALL_GATHER,), chains=CHAINS)
    assert failed == [] and len(figures) == 2


def double_rows(function):
    def wrong(*args):
        result = function(*args)
        return dataclasses.replace(result, tokens=result.tokens.at[0, 0].multiply(2))

    return wrong


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("wrap", "what"),
    [
        ((double_rows, lambda f: f), "rows must equal their tokens; 4 do not"),
        ((lambda f: f, lambda f: lambda *a: 1.25 * f(*a)), "combine must be within"),
    ],
)
def test_a_wrong_result_is_noticed(mesh, monkeypatch, wrap, what) -> None:
    right = BASELINES[ALL_GATHER]
    wrong = tuple(wrap(f) for wrap, f in zip(wrap, right, strict=True))
    monkeypatch.setitem(BASELINES, ALL_GATHER, wrong)
    names, chains = (AT_COMBINE, ALL_GATHER), {"round trip": (1, 2)}
    figures, (why,) = measured(mesh, names, chains=chains)
    assert why.startswith(f"{ALL_GATHER}: ") and what in why
    assert {name for name, _, _ in figures} == {AT_COMBINE}


def test_a_wrong_gradient_is_noticed(mesh, monkeypatch) -> None:
    forward = programs.with_gradients

    def wrong(step):
        def next(*args):
            d_tokens, results = forward(step).next(*args)
            return d_tokens, results | {"d_weights": 1.25 * results["d_weights"]}

        return programs.Step(next)

    monkeypatch.setattr(programs, "with_gradients", wrong)
    chains = {"round trip + grad": (1, 2)}
    _, (why,) = measured(mesh, (AT_COMBINE,), chains=chains)
    assert "gradient of weights must be within" in why


@pytest.mark.parametrize("name", [AT_DISPATCH, AT_COMBINE, ALL_GATHER])
def test_chains_are_not_merged(mesh, name) -> None:
    """Every step has its own calls, and the loops that hide them from XLA."""
    case = dataclasses.replace(CASE, n_ranks=4)
    implementation = implementations.make(name, mesh, case, "host")
    step, args = programs.round_trip(implementation), Workload(mesh, case, 1).chain_args
    chain = programs.on_mesh(mesh, programs.chain(step, 3, on_gpu=False))
    text = chain.lower(*args).compile().as_text()
    hides = r' while\(.*op_name="[^"]*/while"'  # XLA makes other loops of scatters
    counts = {
        what: len(re.findall(what, text))
        for what in (hides, '="jax_ep_dispatch"', '="jax_ep_combine"', r" sort\(")
    }
    of_each = [2, 1, 1, 0] if name in OURS else [2, 0, 0, 1]
    assert list(counts.values()) == [3 * n for n in of_each], counts


def test_a_period_is_a_difference_of_two_lengths(monkeypatch) -> None:
    order, seconds = [], {"a": 3.0, "b": 5.0}

    def fake(call, repeats):
        name, n = call
        order.append(call)
        return 100.0 + n * seconds[name]  # 100 s are the launch's

    monkeypatch.setattr(timing, "_seconds", fake)
    chains = {name: ((name, 2), (name, 8)) for name in "ab"}
    repeats = timing.Repeats(max_samples=4, seconds=1.0)
    assert timing.period(chains, (2, 8), repeats) == {"a": [3.0] * 4, "b": [5.0] * 4}
    firsts = [name for name, n in order[4::4]]  # after the warm-up
    assert firsts == ["a", "b", "a", "b"]


def test_a_slow_function_has_few_samples(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(timing.time, "monotonic", lambda: now[0])

    def fake(call, repeats):
        now[0] += 2.0
        return 2.0

    monkeypatch.setattr(timing, "_seconds", fake)
    samples = timing.wall({"slow": None}, timing.Repeats(max_samples=9, seconds=1.0))
    assert samples == {"slow": [2.0] * 3}
    assert timing.summary([1e-6, 2e-6, 4e-6]) == {"us": [2, 1.5, 3], "n": 3}


def test_remote_messages_are_one_per_token_and_rank() -> None:
    case = Case(2, hidden_size=64, n_experts=8, top_k=2, n_ranks=2)
    ids = np.array([[0, 1], [0, 4], [4, 5], [0, -1]])  # 2 tokens of each rank
    assert remote_messages(case, ids) == 1


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routings_differ_by_seed_and_name_no_expert_twice(routing) -> None:
    case = Case(32, **SIZES, routing=routing, n_ranks=4)
    (ids, weights), (others, _) = (make_routing(case, seed) for seed in (0, 1))
    assert (ids != others).any()
    assert all(len(set(row[row >= 0])) == (row >= 0).sum() for row in ids)
    assert (abs(weights.sum(1) - 1) < 0.5).all() and (weights.sum(1) != 1).any()
    ranks = {i // 4 for i in ids[ids >= 0]}
    assert ranks == ({min(ranks)} if routing == "one_rank" else set(range(4)))
    assert (ids < 0).any() == (routing == "half_empty")


def test_a_capacity_has_spare_rows_but_not_beyond_the_worst_case() -> None:
    sizes = {"hidden_size": 64, "n_experts": 256, "top_k": 8, "n_ranks": 4}
    n_rows = [Case(n, capacity=1.5, **sizes).n_rows for n in (1, 8, 128, 4096)]
    assert n_rows == [32, 128, 1536, 49152]  # worst case, mean + 64, 1.5 x the mean
    assert Case(128, **sizes).n_rows == 4096


EVENT = "events {{ metadata_id: {} offset_ps: {} duration_ps: {} }}"
PLANE = """planes {{
    name: "{}"
    event_metadata {{ key: 1 value {{ id: 1 name: "void DispatchKernel(x)" }} }}
    event_metadata {{ key: 2 value {{ id: 2 name: "fusion" }} }}
    lines {{ name: "Stream #7(Compute)" timestamp_ns: 100 {} }}
    lines {{ name: "XLA Ops" timestamp_ns: 100 {} }}
}}
"""


def test_a_trace_is_read_by_gpu() -> None:
    late = EVENT.format(1, 13_000_000, 7_000_000)  # 13 µs after the start, for 7 µs
    early = EVENT.format(1, 10_000_000, 2_000_000)
    other = EVENT.format(2, 5_000_000, 1_000_000)
    planes = [PLANE.format(f"/device:GPU:{i}", late + early + other, early) for i in "01"]
    text = "".join([*planes, PLANE.format("/host:CPU", early, early)])
    serialized = jax.profiler.ProfileData.text_proto_to_serialized_xspace(text)
    profile = jax.profiler.ProfileData.from_serialized_xspace(serialized)
    traced = profiler.read(profile)
    assert len(traced) == 2
    names = [event.name for event in traced[0]]
    assert names == ["fusion", "void DispatchKernel(x)", "void DispatchKernel(x)"]
    assert np.allclose([e.seconds for e in traced[1]], [1e-6, 2e-6, 7e-6])


def fake_trace(n_sets, extra=()):
    """5 calls on 4 GPUs: each set's dispatch, then each set's combine."""
    traced = []
    for gpu in range(4):
        times = [(k, 10 + i + gpu) for k in ("Dispatch", "Combine") for i in range(n_sets)]
        one = [profiler.Event(f"void {k}Kernel()", 0, us * 1e-6) for k, us in times]
        traced.append(5 * [*one, profiler.Event("fusion", 0, 3e-6), *extra])
    return traced


def test_kernel_times_leave_out_the_first_dispatch_of_a_call(mesh, monkeypatch) -> None:
    monkeypatch.setattr(profiler, "trace", lambda call, flush: fake_trace(3))
    figures, _ = measured(mesh, OURS, n_sets=3)
    # 10 to 15 µs.
    wanted = {"dispatch": (13, 40), "combine": (12.5, 60)}
    assert {key: (found["us"][0], found["n"]) for key, found in figures.items()} == {
        (name, operation, "kernel"): figure for name in OURS for operation, figure in wanted.items()
    }
    assert profiler.other_seconds(fake_trace(2)) == pytest.approx([3e-6] * 4)


def test_a_trace_that_lacks_kernels_is_refused() -> None:
    with pytest.raises(profiler.TraceError, match=r"must show 15 times .* got \{10\}"):
        profiler.kernel_seconds(fake_trace(2), "combine", 3)


@pytest.mark.parametrize("name", ["blockwise_fp8", "mxfp4"])
def test_a_format_whose_rows_are_wrong_is_noticed(mesh, monkeypatch, name) -> None:
    monkeypatch.setattr(profiler, "trace", lambda call, flush: fake_trace(2))
    case = dataclasses.replace(CASE, hidden_size=128, token_format=name)
    figures, _ = measured(mesh, (AT_COMBINE,), case, n_sets=2)
    assert figures.keys() == {(AT_COMBINE, "dispatch", "kernel")}
    assert figures[AT_COMBINE, "dispatch", "kernel"]["us"][0] == 12.5
    right = jax_ep.dequantize
    monkeypatch.setattr(jax_ep, "dequantize", lambda *args: -right(*args))
    _, (why,) = measured(mesh, (AT_COMBINE,), case)
    assert "rows must be near the tokens" in why


@pytest.mark.thorough
def test_layers_are_measured_with_and_without_balanced_ranks(mesh) -> None:
    case = dataclasses.replace(CASE, routing="skewed", capacity=3.0, expert_size=32)
    operations = "layer", "layer + grad"
    names, chains = (AT_DISPATCH, BALANCED), dict.fromkeys(operations, (1, 2))
    figures, failed = measured(mesh, names, case, chains=chains)
    assert failed == []
    assert figures.keys() == {(name, o, "chain") for name in names for o in operations}


OVERLAP_OPERATIONS = ("dispatch", "combine", "dense", "dispatch + dense", "combine + dense")


def test_calls_are_measured_beside_a_layer(mesh, monkeypatch) -> None:
    monkeypatch.setattr(profiler, "trace", lambda call, flush: fake_trace(2))
    case = dataclasses.replace(CASE, n_sms=4, width=128)
    options = {"chains": dict.fromkeys(OVERLAP_OPERATIONS, (1, 2)), "bursts": (1, 2)}
    figures, failed = measured(mesh, (AT_DISPATCH,), case, **options)
    clocks = ("chain", "chain in bursts", "other kernels")
    assert failed == []
    assert figures.keys() == {(AT_DISPATCH, o, c) for o in OVERLAP_OPERATIONS for c in clocks}
