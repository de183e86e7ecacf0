"""The effect of `EPGroup.close` on calls that were enqueued before it, on `host`."""

import collections
import gc
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harness import on_mesh
from host_calls import make_tokens, open_group, round_trip, without_rank_3
from jax_ep.group import dropped

pytestmark = pytest.mark.usefixtures("one_process")


def test_calls_enqueued_before_close_complete():
    """XLA has started none of the programs, some, or the first one on some devices."""
    tokens = make_tokens()
    with open_group(timeout_s=50) as group:
        step = on_mesh(group.mesh, lambda x: round_trip(group, round_trip(group, x)))
        jax.block_until_ready(step(tokens))
    for i in range(60):
        with open_group(timeout_s=50):
            out = tokens
            for _ in range(1 + i % 10):
                out = step(out)
        np.testing.assert_array_equal(np.asarray(out), np.asarray(tokens))
    with pytest.raises(jax.errors.JaxRuntimeError, match="is not open"):
        jax.block_until_ready(step(tokens))


def test_the_backward_pass_completes():
    tokens = make_tokens()
    with open_group(timeout_s=49) as group:
        loss = lambda x: jnp.sum(round_trip(group, x).astype(jnp.float32))  # noqa: E731
        grad = on_mesh(group.mesh, jax.grad(loss))
        jax.block_until_ready(grad(tokens))
    for _ in range(20):
        with open_group(timeout_s=49):
            out = grad(tokens)
        np.testing.assert_array_equal(np.asarray(out, np.float32), 1)


def test_close_waits_for_a_missing_rank_no_longer_than_the_call():
    group = open_group(timeout_s=0.5)
    out = on_mesh(group.mesh, lambda x: without_rank_3(group, x))(make_tokens())
    group.close()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"ranks 0, 1, 2 waited 0.5 s for rank 3"):
        jax.block_until_ready(out)


def test_close_waits_as_long_as_calls_complete():
    """In all longer than `timeout_s` and the grace."""
    group, tokens = open_group(timeout_s=0.5), make_tokens()

    def pause(_):
        time.sleep(0.5)
        return np.zeros((), jnp.bfloat16)

    def step(tokens, _):
        zero = jax.pure_callback(pause, jax.ShapeDtypeStruct((), tokens.dtype), tokens[0, 0])
        return round_trip(group, tokens + zero), None

    def body(tokens):
        return jax.lax.scan(step, tokens, length=5)[0]

    begin = time.monotonic()
    out = on_mesh(group.mesh, body, check_vma=False)(tokens)
    group.close()
    assert time.monotonic() - begin > 2
    np.testing.assert_array_equal(np.asarray(out), np.asarray(tokens))


def test_close_does_not_wait_forever():
    """Here for a call of another group, which ends later."""
    group, slow = open_group(timeout_s=0.3), open_group(timeout_s=4)
    out = on_mesh(slow.mesh, lambda x: without_rank_3(slow, x))(make_tokens())
    with pytest.warns(RuntimeWarning, match="closed although results .* being computed") as caught:
        group.close()
    assert caught[0].filename == __file__
    assert not out.is_ready()
    with pytest.raises(jax.errors.JaxRuntimeError, match="waited 4 s for rank 3"):
        jax.block_until_ready(out)


def test_close_does_not_count_a_pause_of_the_process(monkeypatch):
    """A clock that jumps once while `close` sleeps, as it does if the process is stopped."""
    group = open_group(timeout_s=1.5)
    out = on_mesh(group.mesh, lambda x: without_rank_3(group, x))(make_tokens())
    monotonic, sleep, paused = time.monotonic, time.sleep, [0.0]

    def sleep_through_a_pause(seconds):
        sleep(seconds)
        paused[0] = 60

    monkeypatch.setattr(time, "sleep", sleep_through_a_pause)
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + paused[0])
    group.close()  # without a warning
    with pytest.raises(jax.errors.JaxRuntimeError, match="waited 1.5 s for rank 3"):
        jax.block_until_ready(out)


def test_close_returns_at_once_if_nothing_is_computed():
    deleted, kept = make_tokens(), make_tokens()
    deleted.delete()
    group = open_group(timeout_s=50)
    begin = time.monotonic()
    group.close()
    assert time.monotonic() - begin < 1
    assert kept.is_ready()


def test_a_group_that_the_program_drops_is_named_when_the_next_one_opens(monkeypatch, caplog):
    """It stays open, as compiled programs may call it; groups that were closed are not named."""
    waiting = collections.deque()
    monkeypatch.setattr(dropped, "_dropped", waiting)
    group = open_group(timeout_s=47)
    key = group.key
    equal = open_group(timeout_s=47)
    group = None
    gc.collect()
    assert len(waiting) == 1
    open_group(timeout_s=48).close()
    assert not waiting and not caplog.records  # an equal group is in use
    group, equal = equal, None
    with open_group(timeout_s=48):
        pass
    group = open_group(timeout_s=48)
    gc.collect()
    (connection,) = waiting
    assert not caplog.records and len(connection.stats()) == group.n_ranks
    group.close()
    for timeout_s in (49, 50):
        open_group(timeout_s).close()
    (record,) = caplog.records
    assert f"Group {key} is still open, although nothing refers to it" in record.message
    connection.close()
