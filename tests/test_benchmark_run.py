"""The benchmarks' command, its processes, and its report of a record."""

import json
import pathlib
import subprocess
import sys

import pytest
from matplotlib import image

from processes import child_environment

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

import figure  # noqa: E402
import plan  # noqa: E402
import runner  # noqa: E402
from case import Case  # noqa: E402
from implementations import AT_COMBINE, AT_DISPATCH  # noqa: E402
from report import Report  # noqa: E402

CASE = Case(128, 7168, n_experts=256, top_k=8)

CHILD = """
import json, sys, time
for item in json.loads(sys.argv[2])["items"]:
    print("noise")
    print(json.dumps({"results": ["a", item["name"], "wall", {}]}), flush=True)
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
    ("name", "why"),
    [("hang", ["hang: not done after 1 s"]), ("crash", ["crash: exit code 3"]), ("ends", [])],
)
def test_after_a_process_has_ended_another_measures_the_rest(
    tmp_path, monkeypatch, capfd, name, why
) -> None:
    run = make_run(tmp_path, monkeypatch, limit=1 if name == "hang" else 20)
    run.measure([plan.Item(name, case=CASE) for name in ("a", name, "b")])
    record = json.loads(run.path.read_text())
    assert list(record["results"][CASE.name]) == ["a", name, "b"]
    assert record["failed"] == why
    assert record["machine"]["commit"] == "abc"
    assert "noise" in capfd.readouterr().err


def test_items_not_started_in_time_are_listed(tmp_path, monkeypatch) -> None:
    run = make_run(tmp_path, monkeypatch, seconds_total=0)
    run.measure([plan.Item("a", variant="memory kept")])
    assert run.record["not_measured"] == ["a: not started within 0 s"]
    assert run.record["results"] == {}


def test_variants_have_environments_of_their_own(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--some")
    run = make_run(tmp_path, monkeypatch)
    item = plan.Item("a", variant="no command buffers")
    flags = run._environment(item)["XLA_FLAGS"]
    assert flags == "--some --xla_gpu_enable_command_buffer="
    run = make_run(tmp_path, monkeypatch, rehearse=True)
    assert "device_count=4" in run._environment(plan.Item("a"))["XLA_FLAGS"]


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


def test_the_platform_is_jaxs_unless_it_is_given() -> None:
    names = [
        run_benchmarks(*options, "--list").stdout.splitlines()
        for options in ([], ["--platform", "gpu"])
    ]
    assert "T16-H256-uniform" in names[0]
    assert "T4096-H7168-uniform-1.5x" in names[1]


def test_a_rehearsal_lacks_only_what_needs_gpus(tmp_path) -> None:
    only = ("link", "T16-H64-uniform", "*-mxfp8", "calls", "T32-*")
    options = [word for pattern in only for word in ("--only", pattern)]
    done = run_benchmarks("--rehearse", *options, "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "gpu_cpu-x4.json").read_text())
    assert record["failed"] == []
    no_gpu = "the profiler's trace shows no GPU"
    assert all("link" in why or no_gpu in why for why in record["not_measured"])
    found = record["results"]["T16-H64-uniform"]
    for operation in ("round trip", "round trip + grad"):
        assert found[operation].keys() == {"wall", "chain"}
    shown = run_benchmarks("--report", tmp_path / "gpu_cpu-x4.json")
    assert "round trip + grad, period in a chain, µs:" in shown.stdout
    assert "round trip + grad by capacity, period in a chain, µs:" in shown.stdout
    assert {name.partition("-")[0] for name in record["calls"]} == {"T1", "T8", "T128"}
    assert "| 4 × round trip, T8-H7168-uniform-1.5x, third call |" in shown.stdout


def test_overheads_have_a_figure_for_each_function(tmp_path) -> None:
    options = "--quick", "--platform", "cpu", "--only", "overhead"
    done = run_benchmarks(*options, "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("cpu_*.json")
    record = json.loads(path.read_text())
    assert list(record["overheads"]) == ["host", "xla", "as many results"]


def add(record, operation, clock, name, us, case="T128") -> None:
    by_clock = record["results"].setdefault(case, {}).setdefault(operation, {})
    by_clock.setdefault(clock, {})[name] = {"us": [us, us - 1, us + 1], "n": 9}


def make_record(platform="gpu") -> dict:
    case = dict(n_tokens=128, hidden_size=7168, routing="uniform", capacity=1.5)
    case |= dict(width=0, n_sms=None, token_bytes=14336, remote_messages=340.0)
    record = {
        "platform": platform,
        "machine": {"device": "Some GPU", "n_devices": 4, "cpu": "Some CPU"},
        "link": {"gb_s": 356.1, "gb_s_by_copy_engines": 389.0},
        "cases": {"T128": case | {"token_format": "bf16"}},
        "results": {},
        "overheads": {"host": {"us": [22.0, 21.0, 30.0], "n": 9}},
        "failed": ["T8: bad"],
        "not_measured": [],
    }
    for name, us in ((AT_DISPATCH, 50.0), (AT_COMBINE, 70.0), ("lax a", 140.0)):
        add(record, "round trip", "chain", name, us)
        add(record, "round trip + grad", "chain", name, 3 * us)
        add(record, "dispatch", "wall", name, 2 * us)
    add(record, "round trip", "chain", "lax b", 120.0)
    plain = "T128, no command buffers"
    add(record, "round trip", "chain", AT_DISPATCH, 55.0, case=plain)
    add(record, "dispatch", "kernel", AT_DISPATCH, 20.0)
    add(record, "combine", "kernel", AT_DISPATCH, 25.0)
    add(record, "dispatch", "kernel", AT_COMBINE, 20.0)
    quantized = ("blockwise_fp8", "mxfp8", "nvfp4", "mxfp4")
    for name, us in zip(quantized, (18.0, 17.0, 16.0, 15.0), strict=True):
        record["cases"][name] = case | {"token_format": name}
        add(record, "dispatch", "kernel", AT_COMBINE, us, case=name)
    return record


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


def test_report_of_a_cpu_shows_speed_ups() -> None:
    lines = Report(make_record("cpu")).markdown().splitlines()
    assert "| 128, 7168, 1.5× | 2.0× | – | 1.7× | 2.0× |" in lines
    assert "| host | 22.0 | 21.0 | 30.0 |" in lines


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
    case = record["cases"]["T128"] | {"width": 8192}
    record["cases"] |= {"all": case, "some": case | {"n_sms": 16}}
    periods = {"dispatch": 500.0, "dense": 450.0, "dispatch + dense": 550.0}
    others = {"dispatch": 0.0, "dense": 400.0, "dispatch + dense": 448.0}
    for clock, figures in (("chain", periods), ("other kernels", others)):
        for operation, us in figures.items():
            add(record, operation, clock, AT_DISPATCH, us, case="some")
    add(record, "dispatch", "chain", AT_DISPATCH, 480.0, case="all")
    lines = Report(record).markdown().splitlines()
    wanted = "480 | 500 | 450 | 550 | 89% | 84% | 22% | 12% | 1.69 |"
    assert f"| dispatch, 16, 8192 | {wanted}" in lines


def test_report_shows_gaps_and_first_calls() -> None:
    record = make_record()
    times = {"period": 30.0, "dispatch": 12.0, "combine": 15.0, "gap by period": 1.5, "gap": 1.234}
    figures = {name: {"us": [us, us - 1, us + 1], "n": 9} for name, us in times.items()}
    only_period = {"period": figures["period"]}
    record["calls"] = {"T8": figures | {"others": {"fusion": 0.5}}, "T1": only_period}
    ours, empty = ({"first": {"us": [us, us - 1, us + 1], "n": 9}} for us in (180.0, 90.0))
    record["first_calls"] = {"T8": {"round trips": ours, "as many results": empty}}
    lines = Report(record).markdown().splitlines()
    assert "| T8 | 30.0 | 12.0 | 15.0 | 1.50 | 1.23 | 0.5 | fusion: 0.5 |" in lines
    assert "| T1 | 30.0 | – | – | – | – | – |  |" in lines
    assert "| T8, first call | 180 (179 to 181) | 90.0 (89.0 to 91.0) | 90.0 |" in lines


def test_report_compares_capacities_in_a_table_of_their_own() -> None:
    record = make_record()
    case, before = record["cases"]["T128"], Report(record).cases()
    for name, us in (("T64-1.25x", 200.0), ("T64", 250.0)):
        record["cases"][name] = case | {"n_tokens": 64}
        add(record, "round trip + grad", "chain", AT_DISPATCH, us, case=name)
    assert "| 64 | 200 | 250 | 1.25 |" in Report(record).markdown().splitlines()
    assert Report(record).cases() == before


def test_the_figure_is_large_enough_to_read(tmp_path) -> None:
    figure.draw(Report(make_record()), tmp_path / "some.png")
    assert min(image.imread(tmp_path / "some.png").shape[:2]) > 300
