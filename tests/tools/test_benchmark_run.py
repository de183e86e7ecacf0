"""The benchmarks' command, its processes, and its report of a record."""

import contextlib
import json
import os
import pathlib
import runpy
import subprocess
import sys

import pytest
from click.testing import CliRunner
from matplotlib import image

from jax_ep.formats import QUANTIZED
from processes import child_environment

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import figure  # noqa: E402
import plan  # noqa: E402
import records  # noqa: E402
import runner  # noqa: E402
from case import Case  # noqa: E402
from implementations import AT_COMBINE, AT_DISPATCH, OURS, REFERENCE  # noqa: E402
from report import Report  # noqa: E402

CASE = Case(128, 7168, n_experts=256, top_k=8)

CHILD = """
import json, sys, time
for item in json.loads(sys.argv[2])["items"]:
    print("noise")
    what = {"operation": item["name"], "clock": "wall", "implementation": "a"}
    print(json.dumps({"times": what | {"us": [2, 1, 3], "n": 9}}), flush=True)
    if item["name"] == "hang":
        time.sleep(60)
    if item["name"] == "crash":
        sys.exit(3)
    print(json.dumps({"done": "", "ends": item["name"] == "ends"}), flush=True)
"""


def make_run(tmp_path, monkeypatch, **options) -> runner.Run:
    """A run whose child only prints, and hangs, crashes or ends in an item of that name."""
    (tmp_path / "__main__.py").write_text(CHILD)
    monkeypatch.setattr(runner, "_HERE", tmp_path)
    monkeypatch.setattr(runner, "_GRACE_S", 0.1)
    defaults = {"limit": 20, "seconds_total": 60, "rehearse": False, "commit": "abc"}
    defaults |= {"out": tmp_path, "command": "some", "say": lambda *args: None}
    return runner.Run("gpu", **defaults | options)


@pytest.mark.parametrize(
    ("name", "why"), [("hang", ["not done after 1 s"]), ("crash", ["exit code 3"]), ("ends", [])]
)
def test_after_a_process_has_ended_another_measures_the_rest(
    tmp_path, monkeypatch, capfd, name, why
) -> None:
    run = make_run(tmp_path, monkeypatch, limit=1 if name == "hang" else 20)
    run.measure([plan.Item(name, case=CASE) for name in ("a", name, "b")])
    (record,) = records.read(run.path)
    assert {row["case"] for row in record.rows("times")} == {CASE.name}
    assert [row["operation"] for row in record.rows("times")] == ["a", name, "b"]
    assert record.rows("failed") == [{"item": name, "why": each} for each in why]
    assert record.facts["commit"] == "abc"
    assert "noise" in capfd.readouterr().err


def test_items_not_started_in_time_are_listed(tmp_path, monkeypatch) -> None:
    run = make_run(tmp_path, monkeypatch, seconds_total=0)
    run.measure([plan.Item("a", variant="memory kept")])
    assert run.record.tables == {"not_measured": [{"item": "a", "why": "not started within 0 s"}]}


def test_variants_have_environments_of_their_own(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--some")
    run = make_run(tmp_path, monkeypatch)
    item = plan.Item("a", variant="no command buffers")
    (environment,) = run._environments(item, [""])
    flags = environment["XLA_FLAGS"]
    assert flags == "--some --xla_gpu_enable_command_buffer="
    run = make_run(tmp_path, monkeypatch, rehearse=True)
    (environment,) = run._environments(plan.Item("a"), [""])
    assert "device_count=4" in environment["XLA_FLAGS"]


@pytest.mark.parametrize(
    ("gpus", "left", "why"),
    [
        ("0,1,2", plan.NODES, []),
        ("0,0", plan.NODES[:2], ["XLA between nodes: NCCL does not serve processes that share"]),
        ("0", (), ["needs 2 GPUs; CUDA_VISIBLE_DEVICES=0,0"]),
    ],
)
def test_each_process_of_a_job_has_a_gpu(tmp_path, monkeypatch, gpus, left, why) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    requests = []

    class Children(contextlib.AbstractContextManager):
        def __init__(self, request, environments):
            given = [each["CUDA_VISIBLE_DEVICES"] for each in environments]
            requests.append((request["items"][0]["implementations"], given))

        def lines(self, seconds, late):
            return [], True

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(runner, "Children", Children)
    run = make_run(tmp_path, monkeypatch)
    item = plan.Item("a", case=CASE, implementations=plan.NODES, n_processes=2)
    run.measure([item])
    assert requests == ([(left, gpus.split(",")[:2])] if left else [])
    found = [row["why"] for row in run.record.rows("not_measured")]
    assert len(found) == len(why)
    assert all(each.startswith(start) for each, start in zip(found, why, strict=True))


@pytest.mark.thorough
def test_what_fails_in_another_process_is_reported(tmp_path, monkeypatch) -> None:
    """The first waits for it until the time limit."""
    (tmp_path / "__main__.py").write_text(
        """
import json, sys, time
request = json.loads(sys.argv[2])
address, n, index = request["job"]
assert n == 2 and address.startswith("localhost:")
if index:
    print(json.dumps({"failed": "some error"}), flush=True)
time.sleep(60)
"""
    )
    monkeypatch.setattr(runner, "_HERE", tmp_path)
    monkeypatch.setattr(runner, "_GRACE_S", 0.1)
    with runner.Children({"items": []}, [dict(os.environ)] * 2) as children:
        lines, ends = children.lines(5.0, "failed")
    assert ends and lines == [{"failed": "not done after 5 s"}, {"failed": "some error"}]


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("is_quick", [False, True])
def test_names_of_items_are_unique_and_only_kind_case_has_a_case(platform, is_quick) -> None:
    items = plan.make_plan(platform, is_quick=is_quick)
    names = [item.name for item in items]
    assert len(set(names)) == len(names)
    assert all(item.kind == "case" or item.case is None for item in items)


def run_benchmarks(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "error", *map(str, (BENCHMARKS, *arguments))],
        env=child_environment() | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.thorough
def test_the_platform_is_jaxs_unless_it_is_given() -> None:
    names = [
        run_benchmarks(*options, "--list").stdout.splitlines()
        for options in ([], ["--platform", "gpu"])
    ]
    assert "T16-H256-uniform" in names[0]
    assert "T4096-H7168-uniform-1.5x" in names[1]


def rehearsed(tmp_path, *patterns) -> tuple[records.Run, str]:
    """The record and the report of a rehearsal in which nothing fails."""
    options = [word for pattern in patterns for word in ("--only", pattern)]
    done = run_benchmarks("--rehearse", *options, "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = records.read(tmp_path / "gpu_cpu-x4.jsonl")
    assert record.rows("failed") == []
    return record, run_benchmarks("--report", tmp_path / "gpu_cpu-x4.jsonl").stdout


@pytest.mark.thorough
def test_a_rehearsal_lacks_only_what_needs_gpus(tmp_path) -> None:
    only = ("link", "T16-H64-uniform", "*-xla", "*-mxfp8", "calls")
    record, shown = rehearsed(tmp_path, *only)
    assert REFERENCE in {row["implementation"] for row in record.rows("times")}
    reasons = ("needs several GPUs", "the profiler's trace shows no GPU")
    assert all(any(r in row["why"] for r in reasons) for row in record.rows("not_measured"))
    found = {
        (row["case"], row["operation"], row["clock"])
        for row in record.rows("times")
        if row["implementation"] != REFERENCE
    }
    for operation in ("round trip", "round trip + grad"):
        assert {("T16-H64-uniform", operation, clock) for clock in ("wall", "chain")} <= found
    of_calls = {name.partition("-")[0] for name, _, clock in found if clock == "gaps"}
    assert of_calls == {"T1", "T8", "T128"}
    periods = Report(record)
    names = (*OURS, "lax")
    is_seen = any(periods.us("T16-H64-uniform", operation, "chain", n) for n in names)
    assert (f"{operation}, period in a chain, µs:" in shown) == is_seen  # noise may hide them


@pytest.mark.thorough
def test_two_processes_rehearse_nodes_without_gpus(tmp_path) -> None:
    record, _ = rehearsed(tmp_path, "*-nodes")
    (row,) = record.rows("times")
    assert (row["case"], row["implementation"]) == ("T16-H64-uniform", "XLA between nodes")
    assert record.facts["n_devices"] == 4
    others = [row["why"] for row in record.rows("not_measured")]
    assert others[0].startswith("one node: Transport 'host' cannot serve: all devices along")
    assert others[1].startswith("nvshmem: Transport 'nvshmem' cannot serve: it serves CUDA")


@pytest.mark.thorough
def test_matmuls_are_rehearsed(tmp_path) -> None:
    record, shown = rehearsed(tmp_path, "matmuls-tiny")
    assert len(record.rows("matmuls")) == 2 * 3
    assert "grouped matmuls, TFLOP/s (time / the larger limit):" in shown


@pytest.mark.thorough
def test_overheads_have_a_figure_for_each_function(tmp_path) -> None:
    options = "--quick", "--platform", "cpu", "--only", "overhead"
    done = run_benchmarks(*options, "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("cpu_*.jsonl")
    (record,) = records.read(path)
    names = [row["implementation"] for row in record.rows("times")]
    assert names == ["host", "xla", "as many results"]


def add(run, operation, clock, name, us, case="T128", **more) -> None:
    what = {"case": case, "operation": operation, "clock": clock, "implementation": name}
    run.add("times", what | {"us": [us, us - 1, us + 1], "n": 9} | more)


CASE_ROW = {"name": "T128", "n_tokens": 128, "hidden_size": 7168, "n_experts": 256, "top_k": 8}
CASE_ROW |= {"routing": "uniform", "capacity": 1.5, "token_format": "bf16", "width": 0}
CASE_ROW |= {"expert_size": 0, "n_ranks": 4, "token_bytes": 14336, "remote_messages": 340.0}


def make_record(platform="gpu") -> records.Run:
    facts = {"platform": platform, "device": "Some GPU", "n_devices": 4, "cpu": "Some CPU"}
    run = records.Run(facts | {"versions": {}, "commit": "abc", "command": "some", "date": "now"})
    run.add("links", {"gb_s": 356.1, "gb_s_by_copy_engines": 389.0})
    run.add("cases", CASE_ROW)
    run.add("failed", {"item": "T8", "why": "bad"})
    for name, us in ((AT_DISPATCH, 50.0), (AT_COMBINE, 70.0), ("lax a", 140.0)):
        add(run, "round trip", "chain", name, us)
        add(run, "round trip + grad", "chain", name, 3 * us)
        add(run, "dispatch", "wall", name, 2 * us)
    add(run, "round trip", "chain", "lax b", 120.0)
    add(run, "round trip", "chain", AT_DISPATCH, 55.0, variant="no command buffers")
    add(run, "dispatch", "kernel", AT_DISPATCH, 20.0)
    add(run, "combine", "kernel", AT_DISPATCH, 25.0)
    add(run, "dispatch", "kernel", AT_COMBINE, 20.0)
    for name, us in zip(QUANTIZED, (18.0, 17.0, 16.0, 15.0), strict=True):
        run.add("cases", CASE_ROW | {"name": name, "token_format": name})
        add(run, "dispatch", "kernel", AT_COMBINE, us, case=name)
    add(run, "dispatch of minimal size", "wall", "host", 22.0, case="overhead")
    return run


def test_report_compares_periods_with_the_best_baseline() -> None:
    lines = Report(make_record()).markdown().splitlines()
    assert "| 128 | 50.0 | 70.0 | 120 (2.4×) |" in lines
    assert "| 128 | 150 | 210 | 420 (2.8×) |" in lines
    assert "| 128 | 55.0 | – | – |" in lines  # without command buffers
    assert "| 128 | 20.0 | 244 | 25.0 | 195 | – |" in lines  # kernels, GB/s
    assert "| T = 128, µs | 20.0 | 18.0 | 17.0 | 16.0 | 15.0 |" in lines
    assert "Link, GB/s off each GPU: 356 by stores of a kernel, 389 by copy engines." in lines
    figures = Report(make_record()).all_figures()
    assert "| T128, round trip, chain | 50.0 (49.0 to 51.0) |" in figures
    assert "failed: T8: bad" in figures


def test_figures_are_printed_as_json(tmp_path) -> None:
    path = tmp_path / "some.jsonl"
    records.write(path, [make_record()])
    main = runpy.run_path(str(BENCHMARKS / "__main__.py"))["main"]
    done = CliRunner().invoke(main, ["--report", str(path), "--format", "json"])
    (run,) = json.loads(done.stdout)
    assert run["facts"]["device"] == "Some GPU"
    (failed,) = run["tables"]["failed"]
    assert failed == {"item": "T8", "why": "bad"}
    assert run["tables"]["times"][0]["us"] == [50.0, 49.0, 51.0]


def test_report_of_a_cpu_shows_speed_ups() -> None:
    lines = Report(make_record("cpu")).markdown().splitlines()
    assert "| 128, 7168, 1.5× | 2.0× | – | 1.7× | 2.0× |" in lines


def test_report_leaves_out_periods_that_noise_hides() -> None:
    record = make_record("cpu")
    add(record, "round trip", "chain", AT_COMBINE, 0.5)
    add(record, "round trip + grad", "chain", AT_DISPATCH, -5.0)
    report = Report(record)
    assert "| 128, 7168, 1.5× | 2.0× | – | – | 2.0× |" in report.markdown().splitlines()
    assert "| 128, 7168, 1.5× | – | 210 | 420 (2.0×) |" in report.markdown().splitlines()
    assert "0.5 (-0.5 to 1.5)" in report.all_figures()


def test_report_shows_how_much_of_a_call_overlaps() -> None:
    record = make_record()
    record.add("cases", CASE_ROW | {"name": "all", "width": 8192})
    record.add("cases", CASE_ROW | {"name": "some", "width": 8192, "n_sms": 16})
    periods = {"dispatch": 500.0, "dense": 450.0, "dispatch + dense": 550.0}
    others = {"dispatch": 0.0, "dense": 400.0, "dispatch + dense": 448.0}
    for clock, figures in (("chain", periods), ("other kernels", others)):
        for operation, us in figures.items():
            add(record, operation, clock, AT_DISPATCH, us, case="some")
    add(record, "dispatch", "chain", AT_DISPATCH, 480.0, case="all")
    lines = Report(record).markdown().splitlines()
    wanted = "480 | 500 | 450 | 550 | 89% | 84% | 22% | 12% | 1.69 |"
    assert f"| dispatch, 16, 8192 | {wanted}" in lines


def test_report_shows_gaps() -> None:
    record = make_record()
    times = {"period": 30.0, "dispatch": 12.0, "combine": 15.0, "gap by period": 1.5, "gap": 1.234}
    for operation, us in times.items():
        add(record, operation, "gaps", AT_DISPATCH, us, case="T8", variant="some")
    record.add("gap_kernels", {"case": "T8", "variant": "some", "name": "fusion", "per_gap": 0.5})
    add(record, "period", "gaps", AT_DISPATCH, 30.0, case="T1")
    lines = Report(record).markdown().splitlines()
    assert "| T8, some | 30.0 | 12.0 | 15.0 | 1.50 | 1.23 | fusion: 0.5 |" in lines
    assert "| T1 | 30.0 | – | – | – | – |  |" in lines


def test_report_compares_nodes_with_one_node() -> None:
    record = make_record()
    for name, us in zip(plan.NODES, (40.0, 100.0, 120.0), strict=True):
        add(record, "round trip", "chain", name, us)
    assert (
        "| 128 | 40.0 (1.00) | 100 (2.50) | 120 (3.00) |" in Report(record).markdown().splitlines()
    )


def test_report_compares_matmuls_with_the_larger_limit() -> None:
    record = make_record()
    sizes = {"n_groups": 4, "n_rows": 1000, "k": 1000, "n": 500}  # 1 GFLOP
    record.add("matmuls", {"name": "m, zipf", "limits": "m", **sizes, "largest": 600})
    for operation, us, dense, memory in (("bfloat16", 4.0, 2.0, 3.2), ("FP8", 2.0, 2.5, 1.0)):
        add(record, operation, "chain", "jax_ep", us, case="m, zipf")
        add(record, operation, "chain", "dense", dense, case="m")
        add(record, operation, "chain", "memory", memory, case="m")
    add(record, "bfloat16", "chain", "lax.ragged_dot", 8.0, case="m, zipf")
    add(record, "gradient of weights", "chain", "jax_ep", 6.0, case="m, zipf")
    lines = Report(record).markdown().splitlines()
    # The dense limit of FP8 is the faster dense matmul, and that of other operations bfloat16's.
    wanted = "| m, zipf | 250 (1.25) | 125 (2.50) | 500 (1.00) | 167 (3.00) |"
    assert wanted in lines


def test_the_figure_is_large_enough_to_read(tmp_path) -> None:
    figure.draw(Report(make_record()), tmp_path / "some.png")
    assert min(image.imread(tmp_path / "some.png").shape[:2]) > 300
