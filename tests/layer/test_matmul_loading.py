"""Kernels of matmuls are loaded before programs with matmuls run, where groups are open."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from gated_matmuls import make_operands
from harness import AXIS, make_mesh
from jax_ep.ffi import extension
from processes import child_environment

MATMULS = (
    "jax_ep_gated_matmul",
    "jax_ep_gated_matmul_grad",
    "jax_ep_gated_scaled_matmul",
    "jax_ep_grouped_matmul",
    "jax_ep_quantize_rows",
    "jax_ep_scaled_matmul_grad",
)


def test_matmuls_alone_are_instantiated():
    try:
        targets = extension.load_cuda().targets()
    except ImportError as error:
        pytest.skip(f"needs the extension: {error}")
    stages = {name: set(found) for name, found in targets.items() if isinstance(found, dict)}
    assert stages == dict.fromkeys(MATMULS, {"instantiate", "execute"})


@pytest.mark.gpu
@pytest.mark.parametrize("check", ["check_a_group_first", "check_a_program_first"])
def test_kernels_are_loaded_ahead(check):
    """In a process that has multiplied nothing."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import runpy; runpy.run_path({__file__!r})['{check}']()"],
        env=child_environment()
        | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "CUDA_MODULE_LOADING": "LAZY"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def check_a_group_first() -> None:
    """As usual. Programs without matmuls load nothing."""
    group = open_group()
    jax.block_until_ready(jax.jit(jnp.tanh)(jnp.ones(8)))
    assert not are_loaded()
    operands = make_operands([3, 140], 64, 40)
    program = compiled(operands)
    assert are_loaded()  # before it has run
    wanted = np.asarray(program(*operands))[:143]
    group.close()
    with open_group():
        assert are_loaded()
        np.testing.assert_array_equal(np.asarray(program(*operands))[:143], wanted)


def check_a_program_first() -> None:
    """Where no group is open, no exchange can be in the way of first launches."""
    operands = make_operands([3, 140], 64, 40)
    jax.block_until_ready(compiled(operands)(*operands))
    assert not are_loaded()
    with open_group():
        assert are_loaded()


def open_group() -> jax_ep.EPGroup:
    config = jax_ep.EPConfig(n_experts=2, top_k=1, hidden_size=64, max_tokens_per_rank=8)
    return jax_ep.ep_init(make_mesh(1), AXIS, config, "p2p")


def compiled(operands):
    """A program that multiplies."""

    def multiply(rows, gate_up, down, offsets):
        return jax_ep.grouped_matmul(rows, gate_up, offsets)

    return jax.jit(multiply).lower(*operands).compile()


def are_loaded() -> bool:
    """Whether this process has loaded the kernels of matmuls on its first device."""
    return extension.load_cuda().are_matmuls_loaded(jax.local_devices()[0].local_hardware_id)
