"""Programs on `host` that are enqueued long before they run.

How many threads XLA has is decided when its backend starts, so programs run in processes of their
own.
"""

import os
import re
import subprocess
import sys

import pytest

import jax_ep
from harness import AXIS, make_mesh
from jax_ep.transports import cpu_threads
from processes import child_environment

pytestmark = pytest.mark.usefixtures("one_process")
N_RANKS, N_STEPS = 4, 300
ADVICE = r"XLA needs 8 threads; it has 4\. Wait for a result .* or set PJRT_NPROC=8 in the env"

# Arguments: ranks, devices, steps, steps between waits (0: never).
PROGRAM = """
import sys
import jax, jax_ep
import jax.numpy as jnp
import numpy as np

n_ranks, n_devices, n_steps, n_between = map(int, sys.argv[1:])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", n_devices)
mesh = jax.sharding.Mesh(jax.devices()[:n_ranks], ("ep",))
config = jax_ep.EPConfig(
    n_experts=2 * n_ranks, top_k=2, hidden_size=64, max_tokens_per_rank=16, timeout_s=4.0
)
group = jax_ep.ep_init(mesh, "ep", config, transport="host")
spec = jax.P("ep")

@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(spec, spec), out_specs=spec)
def step(tokens, ids):
    rows = jax_ep.dispatch(group, tokens, ids)
    return jax_ep.combine(group, rows.tokens, rows) / 2

ids = np.random.default_rng(0).integers(2 * n_ranks, size=(16 * n_ranks, 2), dtype=np.int32)
ids = jax.device_put(ids, jax.NamedSharding(mesh, spec))
start = tokens = jax.device_put(
    jnp.ones((len(ids), 64), jnp.bfloat16), jax.NamedSharding(mesh, spec)
)
for i in range(n_steps):
    tokens = step(tokens, ids)
    if n_between and i % n_between == 0:
        jax.block_until_ready(tokens)
np.testing.assert_array_equal(np.asarray(tokens), np.asarray(start))
print("all steps are right")
"""


def run_steps(n_between: int, n_devices: int = N_RANKS, **environment: str):
    """Enqueues `N_STEPS` steps in a process of its own, with warnings as errors."""
    arguments = map(str, (N_RANKS, n_devices, N_STEPS, n_between))
    return subprocess.run(
        [
            sys.executable,
            "-P",
            "-W",
            environment.pop("warnings", "error"),
            "-c",
            PROGRAM,
            *arguments,
        ],
        env=child_environment() | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_all_steps_run_ahead_with_two_threads_per_device():
    done = run_steps(0, PJRT_NPROC=str(2 * N_RANKS))
    assert done.stdout == "all steps are right\n", done.stderr


def test_all_steps_run_ahead_with_twice_as_many_devices():
    done = run_steps(0, n_devices=2 * N_RANKS, PJRT_NPROC="1")
    assert done.stdout == "all steps are right\n", done.stderr


def test_a_program_that_waits_often_enough_needs_no_more_threads_than_devices():
    done = run_steps(cpu_threads.MAX_IN_FLIGHT, PJRT_NPROC="1", warnings="ignore")
    assert done.stdout == "all steps are right\n", done.stderr


def test_a_program_that_runs_too_far_ahead_ends_with_the_reason():
    done = run_steps(0, PJRT_NPROC="1", warnings="default")
    if cpu_threads._starts_on_own_threads():
        assert done.stdout == "all steps are right\n", done.stderr
        assert "RuntimeWarning" not in done.stderr
        return
    assert done.returncode == 1
    warning, error = done.stderr.split("Traceback", 1)
    assert len(re.findall(f"RuntimeWarning: .*{ADVICE}", warning)) == 1, warning
    assert re.search(rf"waited 4 s for rank.*{ADVICE}", error), error


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 3),
        ({"NPROC": "50"}, 50),
        ({"NPROC": "2"}, 2),
        ({"PJRT_NPROC": "60", "NPROC": "50"}, 60),
        ({"PJRT_NPROC": "many", "NPROC": "50"}, 50),
    ],
)
def test_threads_are_counted_as_xla_does(environment, expected, monkeypatch):
    for name in ("PJRT_NPROC", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})

    class Client:
        def __init__(self, n_devices):
            self.local_device_count = lambda: n_devices

    assert cpu_threads.n_threads(Client(1)) == expected
    assert cpu_threads.n_threads(Client(70)) == 70


def open_group(n_ranks: int, timeout_s: float) -> jax_ep.EPGroup:
    config = jax_ep.EPConfig(
        n_experts=8, top_k=2, hidden_size=16, max_tokens_per_rank=4, timeout_s=timeout_s
    )
    return jax_ep.ep_init(make_mesh(n_ranks), AXIS, config, transport="host")


@pytest.fixture
def few_threads(monkeypatch):
    """As if XLA of an old jaxlib had one thread per rank."""
    monkeypatch.setattr(cpu_threads, "n_threads", lambda _: N_RANKS)
    monkeypatch.setattr(cpu_threads, "_starts_on_own_threads", lambda: False)
    monkeypatch.setattr(cpu_threads, "_warned", False)


@pytest.mark.usefixtures("few_threads")
def test_ep_init_warns_its_caller_once(recwarn):
    with pytest.warns(RuntimeWarning, match=ADVICE) as caught:
        open_group(N_RANKS, 50.0).close()
    assert [each.filename for each in caught] == [__file__]
    recwarn.clear()
    open_group(N_RANKS, 51.0).close()
    assert not recwarn.list


@pytest.mark.usefixtures("few_threads")
@pytest.mark.parametrize("n_ranks", [1, N_RANKS // 2])
def test_ep_init_does_not_warn_where_threads_suffice(n_ranks, recwarn):
    open_group(n_ranks, 50.0).close()
    assert not recwarn.list


def test_a_newer_jaxlib_needs_no_warning(monkeypatch):
    mesh = make_mesh(N_RANKS)
    monkeypatch.setattr(cpu_threads, "n_threads", lambda _: N_RANKS)
    for version, warns in (("0.10.2", True), ("0.11.9", True), ("0.12.0.1", False), ("1.0", False)):
        monkeypatch.setattr(cpu_threads.jaxlib, "__version__", version)
        assert (cpu_threads.how_to_run_ahead(mesh) is not None) == warns, version
