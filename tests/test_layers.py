"""tools/check_layers.py: the layers of ffi/ hold, and it finds what breaks them."""

import pathlib
import shutil
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
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
        ("core/routing.h", "cpu/group.h"),
        ("xla/attributes.h", "layer/matmul/matmul_call.h"),
        ("cpu/group.h", "cuda/call/call_args.h"),
        ("cuda/call/launch.h", "cuda/device/peer.cuh"),
        ("cuda/device/peer.cuh", "cuda/dispatch/dispatch.h"),
        ("cuda/dispatch/dispatch.cu", "cuda/combine/combine.h"),
        ("cuda/combine/combine.cu", "cuda/group/plan.h"),
        ("cuda/group/group.cc", "layer/silu/cuda_silu.h"),
        ("cuda/group/plan.h", "cuda/handlers/handler.h"),
        ("cuda/handlers/handler.h", "internode/handlers/read_rail.h"),
        ("layer/silu/silu.h", "internode/plan/credit_fifo.h"),
        ("internode/plan/credit_fifo.h", "internode/steps/credit_fifo.h"),
        ("internode/handlers/read_rail.h", "cpu/group.h"),
        ("core/ll_packet.h", "target_dict.h"),
        ("target_dict.h", "cpu/group.h"),
    ],
)
def test_an_include_of_a_higher_layer_is_found(seed, name, included):
    (problem,) = seed(name, f'#include "{included}"', included)
    assert problem.startswith(f"ffi/{name}:{line_after(name)}: ")
    assert problem.endswith(f" must not include {included}")


@pytest.mark.parametrize(
    ("name", "line", "feature"),
    [
        ("cuda/group/plan.cc", "constexpr int kMinSmsBesideRail = 32;", "internode"),
        ("cuda/call/call_args.h", "// Of transport `nvshmem`.", "internode"),
        ("cpu/group.h", "// See internode/plan/.", "internode"),
        ("layer/silu/silu.h", "struct Rail;", "internode"),
        ("cuda/group/group.cc", "cudaError_t LoadSiluKernels();", "layer"),
        ("xla/attributes.h", "struct MatmulAttributes;", "layer"),
    ],
)
def test_the_name_of_a_feature_elsewhere_is_found(seed, name, line, feature):
    (problem,) = seed(name, line)
    assert problem.startswith(f"ffi/{name}:{line_after(name)}: ")
    assert problem.endswith(f" must not name what is of {feature}/: {line}")


def test_a_folder_without_a_layer_is_found(tmp_path):
    (tmp_path / "cuda" / "new").mkdir(parents=True)
    (tmp_path / "cuda" / "new" / "new.h").write_text("#pragma once\n")
    (problem,) = find_problems(tmp_path)
    assert problem.startswith("ffi/cuda/new/new.h:1: cuda/new/ has no layer")


@pytest.mark.parametrize(
    ("name", "included"),
    [
        ("cuda_module.cc", "internode/nvshmem/world.h"),
        ("tests/unit/check.h", "layer/silu/silu.h"),
        ("layer/silu/cuda_silu.cu", "cuda/device/copy.cuh"),
        ("internode/plan/rail_call.h", "core/ll_packet.h"),
    ],
)
def test_what_the_table_allows_is_no_problem(seed, name, included):
    assert seed(name, f'#include "{included}"', included) == []


def test_an_include_of_a_library_is_no_problem(seed):
    assert seed("layer/matmul/launch.cc", '#include "cutlass/cutlass.h"') == []
