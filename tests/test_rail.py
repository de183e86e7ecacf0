"""Builds and runs the C++ tests of the exchanges between nodes: their plans and simulations."""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The folder of `rail_test`, `rail_exchange_test` and `rail_table`."""
    tools = str(pathlib.Path(sys.executable).parent)
    cmake = shutil.which("cmake", path=tools) or shutil.which("cmake")
    if cmake is None:
        pytest.skip("needs cmake")
    folder = tmp_path_factory.mktemp("rail")
    targets = ("--target", "rail_test", "rail_exchange_test", "rail_table")
    run([cmake, "-S", REPOSITORY, "-B", folder, "-DJAX_EP_CUDA=OFF"])
    run([cmake, "--build", folder, "--parallel", "2", *targets])
    return folder


def run(command, timeout_s=300):
    result = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=timeout_s
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_protocol_of_nvshmem_is_right_in_simulation_and_faults_are_found(programs):
    output = run([programs / "rail_exchange_test", 100])
    assert "all passed" in output
    assert len(re.findall(r"\(job \d+\)", output)) == 12
    assert "node by node: a deadlock" in output


@pytest.mark.slow
def test_the_protocol_of_nvshmem_is_right_in_many_simulations(programs):
    assert "all passed" in run([programs / "rail_exchange_test", 20000, 1000], timeout_s=3600)


def test_the_planned_protocol_is_right_in_simulation_and_faults_are_found(programs):
    output = run([programs / "rail_test", 100])
    assert "all passed" in output
    assert len(re.findall(r": a deadlock \(", output)) >= 5


@pytest.mark.slow
def test_the_planned_protocol_is_right_in_many_simulations(programs):
    assert "all passed" in run([programs / "rail_test", 20000, 1000], timeout_s=3600)


def test_the_tables_of_the_documentation_are_those_of_the_planner(programs):
    tables = run([programs / "rail_table"])
    documentation = (REPOSITORY / "docs" / "scale.md").read_text()
    for table in re.split(r"^.*:\n\n", tables, flags=re.MULTILINE)[1:]:
        assert table.strip() in documentation, f"run tools/rail_table.sh:\n{table}"
