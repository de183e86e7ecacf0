"""Only few files of ffi/ reach other ranks' memory, and `make lint-peers` finds others that do."""

import pathlib
import subprocess
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).parents[2]
NETWORK = "ffi/nvshmem/kernels/network.cuh"


def check(root):
    """The exit status and what it prints."""
    script = REPOSITORY / "tools" / "check_peer_access.py"
    result = subprocess.run(
        [sys.executable, script, root], capture_output=True, text=True, timeout=60
    )
    assert not result.stderr
    return result.returncode, result.stdout


def test_the_sources_obey():
    assert check(REPOSITORY) == (0, "")


@pytest.mark.parametrize(
    ("line", "belongs"),
    [
        ("cuda::atomic_ref<uint64_t, cuda::thread_scope_system>(*to).store(1);", None),
        ("atomicAdd_system(to, 1);", None),
        ("__threadfence_system();", None),
        ('asm volatile("st.release.sys.global.u64 [%0], %1;" :: "l"(to), "l"(value));', None),
        ('asm volatile("red.relaxed.sys.global.add.u64 [%0], 1;" :: "l"(to));', None),
        ('asm volatile("st.volatile.global.u64 [%0], %1;" :: "l"(to), "l"(value));', None),
        ("*static_cast<volatile uint64_t*>(to) = value;", None),
        ("p2p::st_relaxed_sys(to, value);", None),
        ('asm volatile("multimem.st.global.f32 [%0], %1;" :: "l"(to), "f"(value));', None),
        ("uint8_t* const to = link.peer.heap + offset;", None),
        ("uint8_t* const to = &call.peers[node].heap[offset];", None),
        ("nvshmemx_signal_op(word, 1, NVSHMEM_SIGNAL_ADD, pe);", NETWORK),
        ("nvshmem_quiet();", NETWORK),
        ("#include <nvshmem.h>", NETWORK),
    ],
)
def test_an_access_elsewhere_is_found(line, belongs, tmp_path):
    belongs = belongs or "ffi/p2p/device/peer.cuh"
    for name in (belongs, "ffi/p2p/combine/combine.cu", "ffi/nvshmem/steps/credit_fifo.h"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"// {line}\n\n{line}\n")
    status, output = check(tmp_path)
    assert status == 1
    places = [each.split(":")[:2] for each in output.splitlines()]
    wanted = [["ffi/nvshmem/steps/credit_fifo.h", "3"], ["ffi/p2p/combine/combine.cu", "3"]]
    assert places == wanted
    assert all(each.endswith(f"it belongs into {belongs}") for each in output.splitlines())


def test_what_kernels_do_with_their_own_memory_is_not_found(tmp_path):
    path = tmp_path / "ffi" / "p2p" / "own.cuh"
    path.parent.mkdir(parents=True)
    path.write_text(
        'asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" :: "l"(to));\n'
        "cuda::atomic_ref<uint32_t, cuda::thread_scope_device>(*word).fetch_add(1);\n"
        "const uint8_t* const place = call.heap + offset;\n"
        "if (link.peer.is_mapped()) return;\n"
    )
    assert check(tmp_path) == (0, "")
