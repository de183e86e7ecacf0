"""Warnings of dropped rows in programs that ask for no totals and close no group."""

import subprocess
import sys
import threading
import time

import pytest

from host_calls import open_group
from jax_ep.group import drop_watch
from processes import child_environment

pytestmark = pytest.mark.usefixtures("one_process")
PROGRAM = """
import sys, time
import jax
import jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 2)
import jax_ep
from jax_ep.group import drop_watch
drop_watch.interval_s = {interval_s}
mesh = jax.sharding.Mesh(jax.devices(), ("ep",))
def run(name, recv_capacity):
    config = jax_ep.EPConfig(
        n_experts=4, top_k=1, hidden_size=16, max_tokens_per_rank=8, recv_capacity=recv_capacity,
        name=name,
    )
    group = jax_ep.ep_init(mesh, "ep", config, "host")
    def layer(tokens, ids):
        rows = jax_ep.dispatch(group, tokens, ids)
        return jax_ep.combine(group, rows.tokens, rows)
    layer = jax.shard_map(layer, mesh=mesh, in_specs=jax.P("ep"), out_specs=jax.P("ep"))
    tokens, ids = jnp.ones((16, 16), jnp.bfloat16), jnp.zeros((16, 1), jnp.int32)
    jax.block_until_ready(jax.jit(layer)(tokens, ids))
run("small", 4)
run("small", 4)  # an equal group, as a cell of a notebook makes that runs again
run("large", None)
time.sleep({sleep_s})
print("the last line", file=sys.stderr)
"""


def lines_of(**values):
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM.format(**values)],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [each for each in done.stderr.splitlines() if "dropped" in each or "last line" in each]


def test_a_program_warns_of_drops_when_it_ends():
    last_line, warning = lines_of(interval_s=60, sleep_s=0)
    assert last_line == "the last line"
    assert warning.startswith("Group small-host-ep2-") and "has dropped 24 rows" in warning


@pytest.mark.thorough
def test_a_program_warns_of_drops_once_while_it_runs():
    warning, last_line = lines_of(interval_s=0.1, sleep_s=2)
    assert last_line == "the last line"
    assert warning.startswith("Group small-host-ep2-")


def test_a_closed_group_is_not_watched():
    group = open_group(timeout_s=46)
    assert group._drops in drop_watch._watched
    group.close()
    assert group._drops not in drop_watch._watched


def test_a_check_that_hangs_stops_nobody(monkeypatch):
    """As the totals of a device may, whose kernel hangs: its group closes unread."""
    monkeypatch.setattr(drop_watch, "stop_s", 0.1)
    monkeypatch.setattr(drop_watch, "interval_s", 0.01)
    monkeypatch.setattr(drop_watch, "_ends", threading.Event())
    begun, may_end = threading.Event(), threading.Event()
    group = open_group(timeout_s=44)

    def hang():
        begun.set()
        may_end.wait(60)

    monkeypatch.setattr(group._drops, "check", hang)
    thread = threading.Thread(target=drop_watch._watch, daemon=True)
    thread.start()
    try:
        assert begun.wait(60)
        start = time.monotonic()
        group.close()
        drop_watch._at_exit()
        assert time.monotonic() - start < 30 and thread.is_alive()
    finally:
        may_end.set()
        thread.join(60)
    assert not thread.is_alive() and drop_watch._is_idle.is_set()


def test_a_group_is_opened_where_the_system_refuses_a_thread(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(drop_watch, "_threads", [])
    monkeypatch.setattr(drop_watch.threading.Thread, "start", refuse)
    with open_group(timeout_s=45) as group:
        assert group._drops in drop_watch._watched
    assert not drop_watch._threads
