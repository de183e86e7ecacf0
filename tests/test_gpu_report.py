"""What the GPU benchmark's report makes of a record."""

import json
import pathlib
import sys

from matplotlib import image

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

from gpu import figures, report  # noqa: E402


def figures_of(median_us: float, physical: float | None = None) -> dict:
    result = {"median_us": median_us, "min_us": 1.0, "max_us": 9.0, "logical_gb_s": 7.0}
    return result if physical is None else result | {"physical_gb_s": physical}


def make_record() -> dict:
    case = {"n_tokens": 128, "hidden_size": 7168, "routing": "uniform"}
    common = {"case": case, "command_buffers": True, "failed": [], "name": "T128"}
    ours = {
        "who": "jax_ep",
        "dispatch": figures_of(20.0, 250.0),
        "combine": figures_of(25.0, 200.0),
        "pair_period": {"median_us": 50.0},
        "overhead_us": 2.5,
        "traffic": {"remote_messages": 340.0},
    }
    slow = {"who": "lax all_gather", "dispatch": figures_of(100.0)}
    best = {
        "who": "lax ragged_all_to_all",
        "dispatch": figures_of(60.0),
        "combine": figures_of(50.0),
    }
    plain = {**ours, "command_buffers": False, "pair_period": {"median_us": 55.0}}
    return {
        "machine": {"device": "Some GPU", "n_devices": 4, "jax": "0.11.2"},
        "link": {"gb_s": 400.0, "method": "stores", "gb_s_by_copy_engines": 420.0},
        "results": [{**common, **who} for who in (ours, slow, best, plain)],
    }


def overlap_and_formats() -> dict:
    case = {"n_tokens": 128, "hidden_size": 7168, "routing": "uniform"}
    got = dict(call_us=480.0, call_some_sms_us=500.0, dense_us=450.0, both_us=550.0)
    got |= dict(hidden=0.844, hidden_same_sms=0.889, speedup=1.69, dense_slowdown=0.12)
    got["burst"] = dict(got, both_us=500.0, hidden=0.956)
    formats_of = {"bf16": 30.0, "mxfp8": 24.0}
    return {
        "overlaps": [
            {
                "name": "o",
                "case": case,
                "n_sms": 16,
                "dense_width": 8192,
                "failed": [],
                "dispatch": got,
            }
        ],
        "formats": [
            {
                "name": name,
                "case": case,
                "failed": ["bad"] if name == "mxfp8" else [],
                "token_format": name,
                "token_bytes": 7392,
                "message_bytes": 7552,
                "bytes_off_the_gpu": 2_600_000,
                "dispatch": figures_of(us, 120.0),
            }
            for name, us in formats_of.items()
        ],
    }


def test_report_shows_overlap_and_formats(tmp_path, capsys) -> None:
    record = make_record() | overlap_and_formats()
    path = tmp_path / "gpu_some.json"
    path.write_text(json.dumps(record))
    report.show(path, "markdown")
    lines = capsys.readouterr().out.splitlines()
    assert (
        "| dispatch, T 128, width 8192 "
        "| 16 | 480 | 500 | 450 | 550 | 84 | 89 | 22 | 12 | 1.69 |"
    ) in lines
    assert (
        "| dispatch, burst | 16 | 480 | 500 | 450 | 500 | 96 | 89 | 11 |  | 1.69 |"
    ) in lines
    assert (
        "| 128 | 7168 | mxfp8 | 7392 | 7552 | 2.6 | 24.0 | 1.0 to 9.0 | 120 | 0.80 |"
    ) in lines
    report.show(path, "table")
    assert "A call beside a dense layer" in figures.as_text(record)
    assert figures.failures(record) == ["mxfp8: bad"]


def test_report_compares_with_the_link_and_the_best_rival(tmp_path, capsys) -> None:
    path = tmp_path / "gpu_some.json"
    path.write_text(json.dumps(make_record()))
    report.show(path, "markdown")
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == (
        "| 128 | 7168, uniform | 20.0 | 250 (62 %) | 60.0 (3.0×) "
        "| 25.0 | 200 (50 %) | 50.0 (2.0×) | 2.5 |"
    )
    assert "| 128 | 50.0 | 55.0 | 2.5 | 2.5 |" in lines
    link = "400 GB/s off each GPU by stores; 420 by copy engines"
    assert lines[-1] == f"Link: {link}."
    report.show(path, "table")
    assert "lax ragged_all_to_all" in figures.as_text(make_record())
    report.show(path, "figure")
    assert min(image.imread(tmp_path / "gpu_some.png").shape[:2]) > 500
