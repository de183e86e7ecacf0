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
from jax.errors import JaxRuntimeError

import jax_ep
from jax_ep.cli import bench, doctor, facts, links, main, probe
from jax_ep.ffi import extension
from jax_ep.ffi.extension import why_missing
from processes import child_environment

BENCH_LINE = r"{}\D+(\d+)\D+(\d+)\D+(\d+)\D+(\d+\.\d\d)\b"


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
    verdicts = [probe.Verdict("xla", "it [never] works")]
    monkeypatch.setattr(probe, "try_transports", lambda found: verdicts)
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
    measured = [facts.Link(0, 1, 380.5, True)]
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
    assert report["links"] == [{"source": 0, "target": 1, "gb_per_s": 380.5, "direct": True}]
    transports = {each["name"]: each for each in report["transports"]}
    assert transports["xla"]["works"] is True and transports["xla"]["reason"] is None
    assert transports["p2p"]["works"] is False and "CUDA" in transports["p2p"]["reason"]


def test_the_json_of_doctor_comes_alone_and_with_the_exit_status(monkeypatch):
    verdicts = [probe.Verdict("xla", "it never works")]
    monkeypatch.setattr(probe, "try_transports", lambda found: verdicts)
    result = invoke("doctor", "--ranks", "2", "--platform", "cpu", "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["transports"] == [{"name": "xla", "works": False, "reason": "it never works"}]
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
    reasons = {v.transport: v.reason for v in probe.try_transports(ranks)}
    # One number on each rank.
    assert reasons["host"] == reasons["xla"]
    assert reasons["xla"] == "2 of 2048 numbers came back wrong"
    monkeypatch.setattr(jax_ep, "dispatch", fail)
    reasons = {v.transport: v.reason for v in probe.try_transports(ranks)}
    assert reasons["host"] == reasons["xla"] == "RuntimeError: a cable is loose"


def test_the_link_table_shows_each_pair_of_devices_in_both_directions(monkeypatch):
    found = jax.devices("cpu")[:3]
    rates = {(a.id, b.id): 10.0 * a.id + b.id for a in found for b in found}
    monkeypatch.setattr(links, "gb_per_s", lambda a, b: rates[a.id, b.id])
    monkeypatch.setattr(links, "reaches", lambda a, b: a.id < b.id)
    table = doctor.link_table(found)
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == [str(device.id) for device in found]
    for i, a in enumerate(found):
        for j, b in enumerate(found):
            star = "*" if a.id < b.id else ""
            expected = "-" if a == b else f"{rates[a.id, b.id]:.0f}{star}"
            assert cells[1 + j][i] == expected


def test_a_copy_between_devices_has_a_rate():
    first, second = jax.devices("cpu")[:2]
    assert links.gb_per_s(first, second, n_bytes=1 << 20) > 0


@pytest.mark.parametrize("token_format", ["bf16", "f32"])
def test_bench_prints_times_and_the_rate_of_the_median(token_format, transport):
    n_ranks = min(4, len(jax.devices()))
    shape = "--tokens 8 --hidden 128 --experts 8 --top-k 2 --repeats 5"
    choice = ["--format", token_format, "--transport", transport]
    result = invoke("bench", *shape.split(), "--ranks", str(n_ranks), *choice)
    assert result.exit_code == 0, result.output
    assert f"{transport}, {n_ranks} x " in result.output
    title = " ".join(result.output.split())  # which wraps after a long name of the device
    assert "T=8 H=128 E=8 K=2" in title
    for call in ("dispatch", "combine"):
        numbers = re.search(BENCH_LINE.format(call), result.output)
        median, smallest, largest, _ = map(float, numbers.groups())
        assert 0 < smallest <= median <= largest


def test_bench_takes_every_format():
    for token_format in bench.FORMATS:
        shape = "--tokens 4 --hidden 128 --experts 2 --top-k 1 --ranks 2 --repeats 1"
        options = ["--platform", "cpu", "--format", token_format]
        result = invoke("bench", *shape.split(), *options)
        assert result.exit_code == 0, result.output
        assert f"{token_format}: T=4" in result.output


def test_the_rate_belongs_to_the_median():
    timing = bench.Timing("dispatch", [4e-6, 1e-6, 2e-6], n_bytes=5000)
    assert timing.cells() == ["dispatch", "2", "1", "4", "2.50"]


def test_bench_times_a_layer_and_its_gradients():
    for token_format in ("bf16", "f32", "mxfp8"):
        shape = "--tokens 8 --hidden 128 --experts 4 --top-k 2 --ranks 2 --repeats 2"
        options = ["--platform", "cpu", "--expert-size", "32", "--format", token_format]
        result = invoke("bench", *shape.split(), *options)
        assert result.exit_code == 0, result.output
        assert "K=2 F=32" in result.output
        for name in ("layer", "layer, gradients"):
            assert re.search(rf"{name} \D+\d+\D+\d+\D+\d+\W+$", result.output, re.MULTILINE)


def test_bench_says_how_far_it_is_to_a_person_only(monkeypatch):
    shape = "--tokens 4 --hidden 64 --experts 2 --top-k 1 --ranks 2 --repeats 2".split()
    quiet = invoke("bench", *shape, "--platform", "cpu")
    assert quiet.stderr == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes the stream for a terminal
    watched = invoke("bench", *shape, "--platform", "cpu")
    assert "combine" in watched.stderr and "100%" in watched.stderr
    assert "combine" in watched.stdout and "100%" not in watched.stdout


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ("--ranks 3 --experts 8", "n_experts must be a multiple of n_ranks"),
        ("--ranks 2 --transport pigeon", "transport must be 'auto' or one of"),
        ("--ranks 1000000", "1000000 ranks need as many devices"),
        ("--ranks 2 --experts 4 --top-k 8", "top_k must be at most n_experts"),
        ("--ranks 2 --hidden 100 --format nvfp4", "hidden_size"),
    ],
)
def test_bench_says_which_argument_is_invalid(args, text):
    result = invoke("bench", "--platform", "cpu", *args.split())
    assert result.exit_code == 1
    assert text in result.output


@pytest.mark.parametrize(
    "error", [MemoryError("4 TiB"), JaxRuntimeError("RESOURCE_EXHAUSTED: 4 TiB")]
)
def test_bench_says_that_memory_ran_out(monkeypatch, error):
    def measure(*_):
        raise error

    monkeypatch.setattr(bench, "measure", measure)
    result = invoke("bench", "--platform", "cpu", "--tokens", "8")
    assert result.exit_code == 1
    assert "must fit in memory" in result.output and "4 TiB" in result.output
    assert "Take fewer --tokens" in " ".join(result.output.split())


def test_bench_hides_no_other_error(monkeypatch):
    def measure(*_):
        raise JaxRuntimeError("INTERNAL: wrong")

    monkeypatch.setattr(bench, "measure", measure)
    result = invoke("bench", "--platform", "cpu", "--tokens", "8")
    assert isinstance(result.exception, JaxRuntimeError)


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
    shape = "--tokens 4 --hidden 64 --experts 6 --top-k 2 --repeats 1".split()
    done = run_module("bench", "--platform", "cpu", "--ranks", "3", *shape)
    assert done.returncode == 0, done.stderr
    assert "3 x cpu" in done.stdout


def test_bench_says_how_to_have_more_than_one_cpu_device():
    shape = "--tokens 4 --hidden 64 --experts 6 --top-k 2 --repeats 1".split()
    alone = run_module("bench", "--platform", "cpu", *shape)
    assert alone.returncode == 0, alone.stderr
    assert "1 x cpu" in alone.stdout
    assert alone.stdout.endswith("One CPU device; --ranks 8 makes virtual ones.\n")
    chosen = run_module("bench", "--platform", "cpu", "--ranks", "1", *shape)
    assert chosen.returncode == 0, chosen.stderr
    assert "One CPU device" not in chosen.stdout


def test_without_click_the_error_names_the_extra():
    hide = "import sys, runpy; sys.modules['click'] = None; "
    code = hide + "runpy.run_module('jax_ep', run_name='__main__')"
    done = run_module("doctor", code=code)
    assert done.returncode == 1
    expected = "needs click, which is not installed: pip install 'jax_ep[cli]'."
    assert expected in done.stderr
