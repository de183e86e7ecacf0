"""Lets the system refuse the extension's threads, while groups open and while calls run.

A group that cannot have its threads does not open, and says why; once it can, it does. An open
group needs no further thread, whatever happens to its calls.
"""

import functools
import os
import re
import signal
import sys
import time
import warnings

import jax

import child
import edges  # noqa: F401
from failing import Failing
from jax_ep.ffi import extension
from layer import AXIS, Layer, R, assert_equal, outcome, use_devices

NO_THREAD = r"needs a thread per CPU device.* refused to create one: Resource temporarily unav"


def check_opening(failing) -> int:
    """Each creation of a thread fails once; returns how many there are."""
    layer, n_faults, is_open = Layer(timeout_s=3.0), 0, False
    while not is_open:
        # The threads of an attempt that fails remain, so that the next one needs fewer.
        number = 1 if n_faults == 0 else 2
        with failing.thread(number):
            try:
                layer.open().close()
                is_open = True
            except RuntimeError as error:
                assert re.search(NO_THREAD, str(error)), error
                n_faults += 1
    assert n_faults == R + 1, "a thread per device and the watchdog"
    return n_faults


def check_calls(failing, n_repeats: int) -> int:
    """With no further thread: calls that succeed, fail and wait in vain, inside nodes too."""
    layers = [Layer(timeout_s=1.0), Layer(timeout_s=1.25, n_nodes=2)]
    n_faults = 0
    for layer in layers:
        with layer.open() as group:
            expected, _ = outcome(layer.forward)
            late = layer.program(functools.partial(without_rank_3, layer, group))
            with failing.thread(1, and_later=True):
                for _ in range(n_repeats):
                    assert_equal(outcome(layer.forward)[0], expected)
                    outcome(layer.backward)
                    n_faults += 2
                    if layer.config.n_nodes is None:  # XLA's collectives would end the process
                        check_failing_rank(layer, group)
                        check_missing_rank(layer, late)
                        n_faults += 2
                assert failing.n_threads == 0, "a call has asked for a thread"
            assert_equal(outcome(layer.forward)[0], expected)
    return n_faults


def check_failing_rank(layer, group) -> None:
    ordinal = int(layer.mesh.devices.flat[1].id)
    extension.load_host().fail_next_call(group.key, ordinal, "on purpose")
    with child.at_most(layer.config.timeout_s + 2, "the call"):
        values, errors = outcome(layer.forward)
    assert not values and all("rank 1: on purpose" in error for error in errors), errors


def without_rank_3(layer, group, *operands):
    call = lambda: layer.body(group, *operands)  # noqa: E731
    return jax.lax.cond(jax.lax.axis_index(AXIS) == 3, lambda: operands[0], call)


def check_missing_rank(layer, late) -> None:
    with child.at_most(layer.config.timeout_s + 2, "the call"):
        _, errors = outcome(layer.call(late))
    text = r"dispatch of group \S+: ranks 0, 1, 2 waited 1 s for rank 3"
    assert errors and all(re.search(text, error) for error in errors), errors


def check_fork() -> int:
    """A forked child, which has no threads, closes its groups and ends."""
    with Layer(timeout_s=3.0).open() as group:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns of fork
            pid = os.fork()
        if pid == 0:
            extension.load_host().close_group(group.key)
            os._exit(0)
        for _ in range(200):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done == pid:
                break
            time.sleep(0.1)
        else:
            os.kill(pid, signal.SIGKILL)
            raise AssertionError("a forked child hung")
    assert status == 0, f"a forked child ended with {status}"
    return 1


def main_of_child(quick: bool) -> None:
    failing = Failing()
    done = [check_opening(failing), check_calls(failing, 1 if quick else 10), check_fork()]
    print(sum(done), "faults")


if __name__ == "__main__":
    arguments = child.arguments()
    if arguments.child is None:
        flags = ["quick"] if arguments.quick else []
        n_faults = child.run(__file__, *flags, timeout_s=60 if arguments.quick else 200)
        print(f"threads: {n_faults} faults, no crash, no hang")
        sys.exit()
    use_devices()
    main_of_child("quick" in arguments.child)
