"""Devices, transports and skips for the whole test suite.

By default the tests run on 32 virtual CPU devices of one process. Options, each with an
environment variable for jobs that cannot pass flags:

    --gpu           JAX_EP_TEST_GPU=1         run on the GPUs of this machine instead
    --transports    JAX_EP_TEST_TRANSPORTS    comma-separated, instead of the platform's
    --coordinator   JAX_EP_TEST_COORDINATOR   host:port; joins a `jax.distributed` job
    --process-id    JAX_EP_TEST_PROCESS_ID
    --n-processes   JAX_EP_TEST_N_PROCESSES
    --n-devices     JAX_EP_TEST_N_DEVICES     of all processes, on CPUs: 32

In a job of several processes, run the same files with the same options on every host.
Tests whose mesh is not of all devices are skipped there, as are those of one process.
"""

from __future__ import annotations

import os

import jax
import pytest

CPU_TRANSPORTS = ("xla", "host")
GPU_TRANSPORTS = ("xla", "p2p")
ONE_PROCESS_TRANSPORTS = ("host",)


def pytest_addoption(parser) -> None:
    env = os.environ.get
    group = parser.getgroup("jax_ep")
    group.addoption(
        "--gpu", action="store_true", default=env("JAX_EP_TEST_GPU", "0") == "1"
    )
    group.addoption("--transports", default=env("JAX_EP_TEST_TRANSPORTS"))
    group.addoption("--coordinator", default=env("JAX_EP_TEST_COORDINATOR"))
    group.addoption(
        "--process-id", type=int, default=int(env("JAX_EP_TEST_PROCESS_ID", "0"))
    )
    for name, default in (("n-processes", "1"), ("n-devices", "32")):
        variable = "JAX_EP_TEST_" + name.upper().replace("-", "_")
        group.addoption(f"--{name}", type=int, default=int(env(variable, default)))


def pytest_configure(config) -> None:
    """Chooses the devices; has to run before JAX starts its backend."""
    option = config.option
    if option.gpu:
        jax.config.update("jax_platforms", "cuda,cpu")
    else:
        jax.config.update("jax_platforms", "cpu")
        n_local, rest = divmod(option.n_devices, option.n_processes)
        if rest:
            raise pytest.UsageError(
                f"--n-processes must divide --n-devices={option.n_devices}; got "
                f"{option.n_processes}"
            )
        jax.config.update("jax_num_cpu_devices", n_local)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    if option.coordinator:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            option.coordinator, option.n_processes, option.process_id
        )


@pytest.fixture
def one_process(request) -> None:
    """For tests of transport `host`, and those that read arrays of all ranks."""
    if request.config.option.n_processes > 1:
        pytest.skip("of one process")


def transports(option) -> tuple[str, ...]:
    """Gives the transports under test."""
    if option.transports:
        return tuple(option.transports.split(","))
    names = GPU_TRANSPORTS if option.gpu else CPU_TRANSPORTS
    several = option.n_processes > 1
    return tuple(n for n in names if not several or n not in ONE_PROCESS_TRANSPORTS)


def pytest_generate_tests(metafunc) -> None:
    if "transport" in metafunc.fixturenames:
        metafunc.parametrize("transport", transports(metafunc.config.option))


def pytest_collection_modifyitems(config, items) -> None:
    for item in items:
        if not config.option.gpu and {"gpu", "multigpu"} & set(item.keywords):
            item.add_marker(pytest.mark.skip(reason="needs a GPU: run with --gpu"))
        if "slow" in item.keywords and "slow" not in config.option.markexpr:
            item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))
