"""The benchmarks' results files: their format, and what pages cite of them; sizes of the folder."""

import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))

import records  # noqa: E402
import report  # noqa: E402

FILES = sorted((BENCHMARKS / "results").glob("*.jsonl"))
PAGES = [ROOT / "README.md", BENCHMARKS / "README.md", *(ROOT / "docs").glob("**/*.md")]
FACTS = {"device": "Some", "n_devices": 1, "versions": {}, "commit": "abc", "command": "some"}
FACTS |= {"date": "2026-11-24"}
NOT_MEASURED = {"item": "a", "why": "some"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_results_file_follows_the_format(path, tmp_path) -> None:
    """And has the form in which the harness writes it."""
    runs = records.read(path)
    assert runs and all(run.tables for run in runs)
    records.write(tmp_path / "again", runs)
    assert (tmp_path / "again").read_text() == path.read_text()


def test_results_are_tables_and_figures_of_at_most_200_kb() -> None:
    found = [path for path in (BENCHMARKS / "results").rglob("*") if path.is_file()]
    assert {path.suffix for path in found} == {".jsonl", ".png"}
    assert sum(path.stat().st_size for path in found) <= 200_000


def test_pages_and_results_files_name_each_other() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    cited = {name for name in re.findall(r"[\w-]+\.(?:jsonl|png)", text) if "_" in name}
    cited = {name if name[0] != "_" else f"fused_silu{name}" for name in cited}
    kept = {path.name for path in (BENCHMARKS / "results").iterdir()}
    assert cited >= kept
    assert {name for name in cited if name.startswith(("gpu_", "cpu_", "p2p_"))} <= kept


def cells_of_speed(page: pathlib.Path) -> list[tuple[str, ...]]:
    """T, our round trip, the best `jax.lax` and its ratio, of each row that compares them."""
    row = r"^\| (\d+) \| ([\d.]+) \|(?: [\d.]+ \|)? ([\d.]+) (?:\(|\| )([\d.]+×)"
    return re.findall(row, page.read_text(), re.MULTILINE)


def test_speeds_on_two_gpus_are_those_of_the_data() -> None:
    (run,) = records.read(BENCHMARKS / "results" / "gpu_nvidia-h200-x2.jsonl")
    tables = report.Report(run).markdown()
    readme, page = map(cells_of_speed, [ROOT / "README.md", ROOT / "docs" / "speed.md"])
    assert (len(readme), len(page)) == (5, 12)
    for n_tokens, ours, best, ratio in readme + page:
        figures = rf"\| {n_tokens} \| {ours} \| [\d.]+ \| {best} \({ratio}\) \|"
        assert re.search(figures, tables), (n_tokens, ours, best, ratio)


def test_the_page_lists_every_table() -> None:
    text = (BENCHMARKS / "README.md").read_text()
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|[^|\n]+\|[^|\n]*\|$", text, re.MULTILINE)
    assert set(records.TABLES) == {name for row in rows for name in re.findall(r"\w+", row)}


def test_the_harness_stays_small() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in BENCHMARKS.rglob("*.py")}
    assert sum(lines.values()) <= 3450
    assert max(lines.values()) <= 400


def test_what_is_written_is_read(tmp_path) -> None:
    run = records.Run(FACTS | {"note": None})
    for i, variant in enumerate([None, "some", "some"] * 4):
        what = {"case": "ab"[i // 6], "variant": variant, "operation": "dispatch", "clock": "wall"}
        run.add("times", what | {"implementation": "c", "us": [i, 0.5, 2], "n": i})
    run.add("not_measured", NOT_MEASURED)
    records.write(tmp_path / "some.jsonl", [run, records.Run(FACTS, {"failed": [NOT_MEASURED]})])
    first, second = records.read(tmp_path / "some.jsonl")
    assert first.tables == run.tables and first.facts == FACTS
    assert second.tables == {"failed": [NOT_MEASURED]}
    # A part of the table for each case, which states once what its rows share.
    lines = (tmp_path / "some.jsonl").read_text().splitlines()
    assert lines[1] == (
        '{"table":"times","columns":["variant","us","n"],"all":{"case":"a",'
        '"operation":"dispatch","clock":"wall","implementation":"c"}}'
    )
    assert lines[2:4] == ["[null,[0,0.5,2],0]", '["some",[1,0.5,2],1]']


TIME = {"case": "a", "operation": "b", "clock": "c", "implementation": "d", "us": [1], "n": 1}


@pytest.mark.parametrize(
    ("facts", "tables", "message"),
    [
        ({"commit": None}, {}, "run: commit must be there"),
        ({"color": "red"}, {}, "run: color must be there if required, and known"),
        ({"n_devices": 1.5}, {}, "n_devices must be of kind int; got 1.5"),
        ({"n_devices": True}, {}, "n_devices must be of kind int; got True"),
        ({}, {"colors": [{}]}, "tables must be of cases, .*; got colors"),
        ({}, {"failed": [{"item": "a"}]}, "failed: why must be there"),
        ({}, {"times": [TIME | {"us": ["1"]}]}, "us must be of kind numbers"),
    ],
)
def test_what_breaks_the_format_is_not_written(tmp_path, facts, tables, message) -> None:
    with pytest.raises(ValueError, match=message):
        records.write(tmp_path / "some.jsonl", [records.Run(FACTS | facts, tables)])
    assert not (tmp_path / "some.jsonl").exists()


RUN = str({"run": FACTS}).replace("'", '"')
TABLE = '{"table": "failed", "columns": ["item", "why"]}'


@pytest.mark.parametrize(
    "lines",
    [
        [TABLE],
        [RUN, '["a", "b"]'],
        [RUN, TABLE, '["a"]'],
        [RUN, TABLE, RUN, '["a", "b"]'],
        [RUN, TABLE, '"words"'],
    ],
)
def test_a_line_out_of_place_is_refused(tmp_path, lines) -> None:
    (tmp_path / "some.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=f"some.jsonl:{len(lines)}: a line must be"):
        records.read(tmp_path / "some.jsonl")
