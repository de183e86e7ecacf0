"""A sample of the fault scripts in tests/faults, which run the package against faults."""

import importlib.util
import pathlib

import pytest

import quick

_PATH = pathlib.Path(__file__).parents[1] / "faults" / "__main__.py"
_SPEC = importlib.util.spec_from_file_location("faults", _PATH)
faults = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(faults)


@pytest.mark.thorough
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", quick.params(faults.SCRIPTS, {*faults.SCRIPTS} - {"malformed"}))
def test_no_fault_crashes_hangs_or_goes_unnoticed(name):
    assert faults.run(name, quick=True) > 0


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("import os; os.abort()", "broken ended with status -6"),
        ("raise SystemExit(1)", "broken ended with status 1"),
        ("print('broken: 1 fault, a crash')", "broken ended with status 0"),
        ("import time; time.sleep(60)", "broken did not end within 3 s"),
    ],
)
def test_a_script_that_fails_is_reported_with_its_log(body, why, monkeypatch, tmp_path):
    """Else the test above would pass whatever happens."""
    (tmp_path / "broken.py").write_text(f"print('log', flush=True)\n{body}\n")
    monkeypatch.setattr(faults, "FOLDER", tmp_path)
    monkeypatch.setitem(faults.SCRIPTS, "broken", 3)
    with pytest.raises(AssertionError, match=rf"log\n(.*\n)*{why}"):
        faults.run("broken")
