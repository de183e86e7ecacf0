"""Groups of `host` in several Python threads, and programs that end while calls run."""

import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from harness import on_mesh
from host_calls import make_tokens, open_group, round_trip
from processes import PYTHON, child_environment

pytestmark = pytest.mark.usefixtures("one_process")


def test_threads_open_call_and_close_groups_at_once():
    """Equal groups and others, one of which the main thread keeps open."""
    tokens = make_tokens()
    with open_group(timeout_s=46) as group, ThreadPoolExecutor(6) as pool:
        step = on_mesh(group.mesh, lambda x: round_trip(group, x))

        def work(i):
            with open_group(timeout_s=46 - i % 3) as own:
                own_step = on_mesh(own.mesh, lambda x: round_trip(own, x))
                return np.asarray(step(tokens)), np.asarray(own_step(tokens))

        for results in pool.map(work, range(12)):
            for each in results:
                np.testing.assert_array_equal(each, np.asarray(tokens))


def test_a_group_is_closed_by_several_threads():
    tokens, group = make_tokens(), open_group(timeout_s=42)
    step = on_mesh(group.mesh, lambda x: round_trip(group, x))
    out = step(tokens)
    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(group.close) for _ in range(8)]:
            each.result()
    np.testing.assert_array_equal(np.asarray(out), np.asarray(tokens))
    group.close()
    assert group.closed


PROGRAM = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
from harness import on_mesh
from host_calls import make_tokens, open_group, round_trip, without_rank_3

group, body = open_group(timeout_s=0.4), {body}
step = on_mesh(group.mesh, lambda x: body(group, x))
results = [step(make_tokens()) for _ in range(4)]
print("ends")
"""


@pytest.mark.parametrize("body", ["round_trip", "without_rank_3"])
def test_a_program_may_end_while_calls_run(body):
    """Also while ranks wait for one that does not come."""
    command = [*PYTHON, "-c", PROGRAM.format(body=body)]
    environment = child_environment() | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr
