"""Builds and runs the C++ test of the exchange between nodes: its plan and its simulation."""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    tools = str(pathlib.Path(sys.executable).parent)
    cmake = shutil.which("cmake", path=tools) or shutil.which("cmake")
    if cmake is None:
        pytest.skip("needs cmake")
    folder = tmp_path_factory.mktemp("rail")
    run([cmake, "-S", REPOSITORY, "-B", folder, "-DJAX_EP_CUDA=OFF"])
    run([cmake, "--build", folder, "--target", "rail_exchange_test"])
    return folder / "rail_exchange_test"


@pytest.fixture(scope="module")
def output(program):
    return run([program, 100])


def run(command, timeout_s=300):
    result = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=timeout_s
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_protocol_is_right_in_simulation_and_faults_are_found(output):
    assert "all passed" in output
    assert len(re.findall(r"\(job \d+\)", output)) == 12
    assert "node by node: a deadlock" in output


@pytest.mark.slow
def test_the_protocol_is_right_in_many_simulations(program):
    assert "all passed" in run([program, 20000, 1000], timeout_s=3600)


def test_the_table_of_the_documentation_is_that_of_the_planner(output):
    table = re.findall(r"^\|.*\|$", output, flags=re.MULTILINE)
    assert len(table) == 5
    assert "\n".join(table) in (REPOSITORY / "docs" / "scale.md").read_text()
