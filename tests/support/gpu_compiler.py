"""Programs as XLA compiles them for GPUs that do not exist, and their instructions."""

import functools
import os
import re

import jax
import numpy as np
import pytest
from jax.experimental import topologies

import async_layers
import suite
import transformed_calls
from harness import AXIS, on_mesh
from jax_ep.ffi.extension import register_cuda
from jax_ep.geometry import Geometry
from jax_ep.group import EPGroup
from jax_ep.transports.p2p import P2pConnection

CASE = transformed_calls.CASE
# The compiler's description of an H100 (SXM).
TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
runtime_version { major: 13 } dnn_version_info { major: 9 minor: 7 }
platform_name: "CUDA" device_description_str: "NVIDIA H100 80GB HBM3"
"""
CHECK = "jax_ep_check"
# Instructions that take no time.
FREE = ("bitcast", "constant", "get-tuple-element", "parameter", "tuple")


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    try:
        register_cuda()
        devices = topologies.get_topology_desc(
            "four", "cuda", target_config=TARGET, topology="1x1x4"
        ).devices
    except (ImportError, NotImplementedError) as error:
        if "JAX_EP_TEST_GPU_PROGRAMS" in os.environ:  # then they must be there
            raise
        pytest.skip(f"needs `make gpu-programs`: {error}")
    return jax.sharding.Mesh(np.array(devices), (AXIS,))


def group_of(mesh, config) -> EPGroup:
    """A group that is not open, on GPUs that do not exist."""
    return EPGroup(P2pConnection(Geometry(mesh, AXIS, config, "p2p")))


@pytest.fixture
def make_group(mesh):
    return functools.partial(group_of, mesh)


def compiled(mesh, body, n_operands: int = 2, case=CASE):
    """The compiled program of a function of a rank's tokens, ids and weights."""
    sharding = jax.NamedSharding(mesh, jax.P(AXIS))
    types = operand_types(n_operands, case, sharding)
    options = {"xla_gpu_autotune_level": "0"}  # autotuning would run kernels
    return on_mesh(mesh, body).lower(*types).compile(compiler_options=options)


def operand_types(n_operands: int = 2, case=CASE, sharding=None):
    arrays = suite.make_inputs(case).arrays()[:n_operands]
    return [
        jax.ShapeDtypeStruct((len(x), *x[0].shape), x[0].dtype, sharding=sharding) for x in arrays
    ]


def computations(program) -> list[list[str]]:
    """The instructions of each computation that has a call of ours, in scheduled order."""
    found = []
    for text in re.split(r"\n(?=(?:ENTRY )?%[\w.\-]+ \()", program.as_text()):
        steps = []
        for line in text.splitlines():
            step = re.match(r"\s+(?:ROOT )?%\S+ = .*? ([a-z\-]+)\(", line)
            target = re.search(r'custom_call_target="([^"]+)"', line)
            if target or (step and step[1] not in FREE):
                steps.append(target[1] if target else step[1])
        if any("jax_ep" in step or step == "call-start" for step in steps):
            found.append(steps)
    return found


def our_steps(steps: list[str]) -> list[str]:
    return [step for step in steps if "jax_ep" in step]


def while_in_flight(steps: list[str]) -> list[list[str]]:
    """The instructions between the start and the done of each asynchronous call.

    Leaves out copies of a scan's stacked results, which XLA overlaps with other work, too.
    """
    steps = [step for step in steps if step not in ("fusion-start", "fusion-done")]
    starts = [i for i, step in enumerate(steps) if step == "call-start"]
    dones = [i for i, step in enumerate(steps) if step == "call-done"]
    return [steps[start + 1 : done] for start, done in zip(starts, dones, strict=True)]


def check_overlap(compiled_program, program) -> None:
    """Requires that work overlaps with each asynchronous call, and does not precede it."""
    # docs/overlap.md, "Versions".
    is_exception = jax.__version_info__ >= (0, 12) and program in async_layers.GRADIENTS_OF_LOOPS
    n_found = 0
    for steps in computations(compiled_program):
        for found in while_in_flight(steps):
            assert found[0] == "jax_ep_wait_started" or is_exception, steps
            assert any(s == "fusion" or s.startswith("__cublas") for s in found), steps
            n_found += 1
        assert "".join(steps).count("wait_started") == len(while_in_flight(steps)), steps
    assert n_found == async_layers.N_CALLS[program]
