"""`python -m jax_ep`: what it prints, and how it exits."""

import json
import pathlib
import re
import subprocess
import sys
import types

import jax
import pytest
from click.testing import CliRunner

import jax_ep
from jax_ep import cli
from jax_ep.cli import facts, main
from jax_ep.ffi import extension
from jax_ep.ffi.extension import why_missing
from processes import child_environment


@pytest.fixture(autouse=True)
def devices():
    """Creates the devices before a command asks for fewer of them."""
    return jax.devices()


def invoke(*args: str):
    return CliRunner().invoke(main, args, env={"COLUMNS": "120"})


def test_doctor_shows_versions_devices_and_transports():
    result = invoke("doctor", "--ranks", "4", "--platform", "cpu")
    assert result.exit_code == 0, result.output
    assert re.search(rf"jax_ep\W+{re.escape(jax_ep.__version__)}\b", result.output)
    assert re.search(rf"jaxlib\W+{re.escape(jax.lib.__version__)}\b", result.output)
    assert re.search(r"host\W+yes\b", result.output)
    assert re.search(r"xla\W+yes\b", result.output)
    assert "no: it serves CUDA devices; the mesh has cpu" in result.output
    assert len(re.findall(r"\W\d+\W+\d+\W+cpu\b", result.output)) == 4


def test_doctor_fails_if_no_transport_works(monkeypatch):
    verdicts = [{"name": "xla", "works": False, "reason": "it [never] works"}]
    monkeypatch.setattr(facts, "try_transports", lambda found: verdicts)
    result = invoke("doctor", "--ranks", "2", "--platform", "cpu")
    assert result.exit_code == 1
    assert "no: it [never] works" in result.output
    assert "Error: no transport works on these devices." in result.output


def key_paths(value, path=""):
    """Of all values in a JSON object, as docs/gpus.md writes them."""
    if isinstance(value, dict):
        return {p for k, each in value.items() for p in key_paths(each, f"{path}.{k}")}
    if isinstance(value, list):
        return {p for each in value for p in key_paths(each, f"{path}[]")}
    return {path.removeprefix(".")}


def test_the_json_of_doctor_has_the_documented_keys(monkeypatch):
    measured = [{"source": 0, "target": 1, "gb_per_s": 380.5, "direct": True}]
    monkeypatch.setattr(facts, "measured_links", lambda found: measured)
    monkeypatch.setattr(facts, "cuda_versions", lambda: {"driver": "13.0", "runtime": None})
    result = invoke("doctor", "--ranks", "2", "--platform", "cpu", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    page = pathlib.Path(__file__).parents[2] / "docs" / "gpus.md"
    section = page.read_text().partition("## doctor for scripts")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert key_paths(report) == set(re.findall(r"`([^`]+)`", "".join(rows)))
    assert report["versions"]["jax_ep"] == jax_ep.__version__
    assert [each["rank"] for each in report["devices"]] == [0, 1]
    assert report["links"] == measured
    transports = {each["name"]: each for each in report["transports"]}
    assert transports["xla"]["works"] is True and transports["xla"]["reason"] is None
    assert transports["p2p"]["works"] is False and "CUDA" in transports["p2p"]["reason"]


def test_the_json_of_doctor_comes_alone_and_with_the_exit_status(monkeypatch):
    verdicts = [{"name": "xla", "works": False, "reason": "it never works"}]
    monkeypatch.setattr(facts, "try_transports", lambda found: verdicts)
    result = invoke("doctor", "--ranks", "2", "--platform", "cpu", "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["transports"] == verdicts
    assert "no transport works" in result.stderr


def test_cuda_versions_are_numbers_with_a_point(monkeypatch):
    extension_versions = {"CUDA driver": 13010, "CUDA runtime": 0}
    load = types.SimpleNamespace(cuda_versions=lambda: extension_versions)
    monkeypatch.setattr(extension, "load_cuda", lambda: load)
    assert facts.cuda_versions() == {"driver": "13.1", "runtime": None}


def test_doctor_says_how_to_get_more_cpu_devices():
    output = invoke("doctor", "--ranks", "1", "--platform", "cpu").output
    assert "--ranks 8 makes virtual ones" in output
    assert "serves 1 rank " in output


def test_doctor_names_sources_that_hide_the_package(monkeypatch, tmp_path):
    def fails():
        raise ImportError("no _ffi")

    monkeypatch.setattr(extension, "load_host", fails)
    result = invoke("doctor", "--ranks", "2", "--platform", "cpu")
    assert "the extension jax_ep._ffi cannot be loaded: no _ffi" in result.output
    error, folder = ImportError("x"), tmp_path / "jax_ep"
    assert why_missing("_ffi", error, folder).endswith("cannot be loaded: x")
    assert why_missing("_ffi_cuda", error, folder).endswith("cannot be loaded: x")
    missing = ModuleNotFoundError("x")
    assert "-C cmake.define.JAX_EP_CUDA=ON" in why_missing("_ffi_cuda", missing, folder)
    (tmp_path / "pyproject.toml").touch()
    assert "run from another directory" in why_missing("_ffi", error, folder)


def test_a_transport_that_raises_or_returns_wrong_numbers_does_not_work(monkeypatch):
    def dispatch_wrong_tokens(group, tokens, topk_ids):
        return dispatch(group, tokens.at[0, 0].add(1), topk_ids)

    def fail(group, tokens, topk_ids):
        raise RuntimeError("a cable is loose")

    dispatch, ranks = jax_ep.dispatch, jax.devices("cpu")[:2]
    monkeypatch.setattr(jax_ep, "dispatch", dispatch_wrong_tokens)
    reasons = {v["name"]: v["reason"] for v in facts.try_transports(ranks)}
    # One number on each rank.
    assert reasons["host"] == reasons["xla"]
    assert reasons["xla"] == "2 of 2048 numbers came back wrong"
    monkeypatch.setattr(jax_ep, "dispatch", fail)
    reasons = {v["name"]: v["reason"] for v in facts.try_transports(ranks)}
    assert reasons["host"] == reasons["xla"] == "RuntimeError: a cable is loose"


def test_the_link_table_shows_each_pair_of_devices_in_both_directions(monkeypatch):
    found = jax.devices("cpu")[:3]
    rates = {(a.id, b.id): 10.0 * a.id + b.id for a in found for b in found}
    monkeypatch.setattr(facts, "gb_per_s", lambda a, b: rates[a.id, b.id])
    monkeypatch.setattr(facts, "reaches", lambda a, b: a.id < b.id)
    (table,) = cli._links({"links": facts.measured_links(found), "devices": []})
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == [str(device.id) for device in found]
    for i, a in enumerate(found):
        for j, b in enumerate(found):
            star = "*" if a.id < b.id else ""
            expected = "-" if a == b else f"{rates[a.id, b.id]:.0f}{star}"
            assert cells[1 + j][i] == expected


def test_a_copy_between_devices_has_a_rate():
    first, second = jax.devices("cpu")[:2]
    assert facts.gb_per_s(first, second, n_bytes=1 << 20) > 0


def run_module(*args: str, code: str = "") -> subprocess.CompletedProcess:
    command = code or "import runpy; runpy.run_module('jax_ep', run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-P", "-c", command, *args],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_fresh_process_creates_the_virtual_devices_that_it_needs():
    done = run_module("doctor", "--platform", "cpu", "--ranks", "3")
    assert done.returncode == 0, done.stderr
    assert "serves 3 ranks" in done.stdout


def test_doctor_says_which_argument_is_invalid():
    result = invoke("doctor", "--platform", "cpu", "--ranks", "1000000")
    assert result.exit_code == 1
    assert "1000000 ranks need as many devices" in result.output


def test_without_click_the_error_names_the_extra():
    hide = "import sys, runpy; sys.modules['click'] = None; "
    code = hide + "runpy.run_module('jax_ep', run_name='__main__')"
    done = run_module("doctor", code=code)
    assert done.returncode == 1
    expected = "needs click, which is not installed: pip install 'jax_ep[cli]'."
    assert expected in done.stderr
