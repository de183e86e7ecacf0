"""tools/check_layers.py: the layers of ffi/ hold, and it finds what breaks them."""

import pathlib
import shutil
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from check_layers import MAY_INCLUDE, find_problems  # noqa: E402


@pytest.fixture
def seed(tmp_path):
    """Adds a line to a copy of a file, beside copies of `others`; gives the problems."""

    def add(name: str, line: str, *others: str) -> list[str]:
        for copied in (name, *others):
            (tmp_path / copied).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / "ffi" / copied, tmp_path / copied)
        assert find_problems(tmp_path) == []
        with (tmp_path / name).open("a") as file:
            file.write(f"{line}\n")
        return find_problems(tmp_path)

    return add


def line_after(name: str) -> int:
    """The number of the first line behind a file's."""
    return len((ROOT / "ffi" / name).read_text().splitlines()) + 1


def test_the_layers_hold():
    assert find_problems(ROOT / "ffi") == []


def test_every_folder_of_the_table_exists():
    assert all((ROOT / "ffi" / folder).is_dir() for folder in MAY_INCLUDE)


@pytest.mark.parametrize(
    ("name", "included"),
    [
        ("core/routing.h", "host/group.h"),
        ("xla/attributes.h", "layer/matmul/matmul_call.h"),
        ("host/group.h", "p2p/launch/call_args.h"),
        ("p2p/launch/launch.h", "p2p/device/peer.cuh"),
        ("p2p/device/peer.cuh", "p2p/dispatch/dispatch.h"),
        ("p2p/dispatch/dispatch.cu", "p2p/combine/combine.h"),
        ("p2p/combine/combine.cu", "p2p/open/plan.h"),
        ("p2p/open/group.cc", "layer/activation/cuda_silu.h"),
        ("p2p/open/plan.h", "p2p/call/read_call.h"),
        ("layer/matmul/kernels.h", "layer/matmul/hopper/params.h"),
        ("layer/matmul/hopper/params.h", "layer/matmul/call/load_matmuls.h"),
        ("p2p/call/read_call.h", "nvshmem/call/read_rail.h"),
        ("layer/activation/silu.h", "nvshmem/plan/rail_exchange.h"),
        ("nvshmem/plan/rail_exchange.h", "nvshmem/steps/credit_fifo.h"),
        ("nvshmem/call/read_rail.h", "host/group.h"),
        ("core/message.h", "modules/dicts.h"),
        ("modules/dicts.h", "host/group.h"),
    ],
)
def test_an_include_of_a_higher_layer_is_found(seed, name, included):
    (problem,) = seed(name, f'#include "{included}"', included)
    assert problem.startswith(f"ffi/{name}:{line_after(name)}: ")
    assert problem.endswith(f" must not include {included}")


@pytest.mark.parametrize(
    ("name", "line", "feature"),
    [
        ("p2p/open/plan.cc", "constexpr int kMinSmsBesideRail = 32;", "nvshmem"),
        ("p2p/launch/call_args.h", "// Of transport `nvshmem`.", "nvshmem"),
        ("host/group.h", "// See nvshmem/plan/.", "nvshmem"),
        ("layer/activation/silu.h", "struct Rail;", "nvshmem"),
        ("p2p/open/group.cc", "cudaError_t LoadSiluKernels();", "layer"),
        ("xla/attributes.h", "struct MatmulAttributes;", "layer"),
    ],
)
def test_the_name_of_a_feature_elsewhere_is_found(seed, name, line, feature):
    (problem,) = seed(name, line)
    assert problem.startswith(f"ffi/{name}:{line_after(name)}: ")
    assert problem.endswith(f" must not name what is of {feature}/: {line}")


def test_a_folder_without_a_layer_is_found(tmp_path):
    (tmp_path / "p2p" / "new").mkdir(parents=True)
    (tmp_path / "p2p" / "new" / "new.h").write_text("#pragma once\n")
    (problem,) = find_problems(tmp_path)
    assert problem.startswith("ffi/p2p/new/new.h:1: p2p/new/ has no layer")


@pytest.mark.parametrize(
    ("name", "included"),
    [
        ("modules/cuda.cc", "nvshmem/world/world.h"),
        ("tests/unit/check.h", "layer/activation/silu.h"),
        ("layer/activation/cuda_silu.cu", "p2p/device/copy.cuh"),
        ("nvshmem/plan/rail_call.h", "core/message.h"),
    ],
)
def test_what_the_table_allows_is_no_problem(seed, name, included):
    assert seed(name, f'#include "{included}"', included) == []


def test_an_include_of_a_library_is_no_problem(seed):
    assert seed("layer/matmul/call/launch.cc", '#include "cutlass/cutlass.h"') == []
