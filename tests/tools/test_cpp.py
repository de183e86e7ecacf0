"""Builds and runs the C++ tests of the host transport, which need neither XLA nor Python."""

import pathlib
import shutil
import subprocess
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).parents[2]


@pytest.mark.thorough
def test_the_cpp_tests_of_the_host_transport_pass(tmp_path):
    tools = str(pathlib.Path(sys.executable).parent)
    cmake = shutil.which("cmake", path=tools) or shutil.which("cmake")
    if cmake is None:
        pytest.skip("needs cmake")
    for command in (
        [cmake, "-S", REPOSITORY, "-B", tmp_path, "-DJAX_EP_CUDA=OFF"],
        [cmake, "--build", tmp_path, "--parallel", "2", "--target", "host_test"],
        [tmp_path / "host_test"],
    ):
        result = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, result.stdout + result.stderr
    assert "all passed" in result.stdout
