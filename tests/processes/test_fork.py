"""Processes that are forked while a group of `host` is open, such as those that load data."""

import multiprocessing
import os
import signal
import traceback
import warnings

import numpy as np
import pytest

from harness import on_mesh
from host_calls import make_tokens, open_group, round_trip

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.fixture(autouse=True)
def no_warning_of_forks():
    """JAX and Python 3.12 warn of them, in processes with threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def status_of_fork(function) -> int:
    """Of a forked process that calls the function; 0 if it returns."""
    pid = os.fork()
    if pid == 0:
        status = 1
        signal.alarm(30)  # ends one that hangs
        try:
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]


def test_workers_load_data_while_calls_run():
    tokens = make_tokens()
    with open_group(timeout_s=48) as group:
        step = on_mesh(group.mesh, lambda x: round_trip(group, x))
        out = step(tokens)
        with multiprocessing.get_context("fork").Pool(2) as pool:
            for i in range(8):
                (loaded,) = pool.map(np.arange, [i])
                np.testing.assert_array_equal(loaded, np.arange(i))
                out = step(out)
        np.testing.assert_array_equal(np.asarray(out), np.asarray(tokens))


def test_a_forked_process_leaves_the_group_to_its_parent():
    tokens, group = make_tokens(), open_group(timeout_s=47)
    step = on_mesh(group.mesh, lambda x: round_trip(group, x))

    def close():
        group._connection.close = lambda: os._exit(2)
        with pytest.raises(ValueError, match="dispatch: group .* this one is a fork"):
            step(tokens)
        with group:
            pass
        assert group.closed

    assert status_of_fork(close) == 0
    assert not group.closed
    np.testing.assert_array_equal(np.asarray(step(tokens)), np.asarray(tokens))
    group.close()
