"""Builds and runs the C++ tests of the inter-node exchange: of its plan, and its simulation."""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import rail_traffic

REPOSITORY = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The folder of `rail_plan_test` and `rail_exchange_test`."""
    tools = str(pathlib.Path(sys.executable).parent)
    cmake = shutil.which("cmake", path=tools) or shutil.which("cmake")
    if cmake is None:
        pytest.skip("needs cmake")
    folder = tmp_path_factory.mktemp("rail")
    run([cmake, "-S", REPOSITORY, "-B", folder, "-DJAX_EP_CUDA=OFF"])
    targets = ("--target", "rail_plan_test", "rail_exchange_test")
    run([cmake, "--build", folder, "--parallel", "2", *targets])
    return folder


def run(command, timeout_s=300):
    result = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=timeout_s
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.thorough
def test_the_plan_is_right_and_the_documentation_has_its_table(programs):
    output = run([programs / "rail_plan_test"])
    assert "all passed" in output
    table = re.findall(r"^\|.*\|$", output, flags=re.MULTILINE)
    assert len(table) == 5
    assert "\n".join(table) in (REPOSITORY / "docs" / "dev" / "scale.md").read_text()


@pytest.mark.thorough
def test_tiles_are_cut_as_in_cpp(programs):
    output = run([programs / "rail_plan_test", 2000])
    found = re.findall(r"^cut ([\d ]+) to ([\d ]+)$", output, flags=re.MULTILINE)
    assert len(found) == 2000
    for given, cut in found:
        n_nodes, message_bytes, *of_call = map(int, given.split())
        slot = rail_traffic.slot_bytes(n_nodes, message_bytes)
        tiles = rail_traffic.cut(slot, *of_call)
        got = slot, tiles.tile_rows, tiles.n_tiles, tiles.extra_bytes
        assert got == tuple(map(int, cut.split())), (given, cut)


@pytest.mark.thorough
def test_the_protocol_is_right_in_simulation_and_mistakes_are_found(programs):
    output = run([programs / "rail_exchange_test", 100])
    assert "all passed" in output
    assert len(re.findall(r"^mistake .*\(job \d+\)$", output, flags=re.MULTILINE)) == 12


@pytest.mark.slow
def test_the_protocol_is_right_in_many_simulations(programs):
    assert "all passed" in run([programs / "rail_exchange_test", 20000, 1000], timeout_s=3600)
