"""Stops the whole process, for longer than `timeout_s`, while ranks wait for another.

A debugger does so, or a laptop's lid. No call may fail of it, and results must be right. A rank
that never arrives must still end the call, in as much time as the process was running.
"""

import re
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

import child
import edges  # noqa: F401
from layer import AXIS, Layer, assert_equal, outcome, use_devices

TIMEOUT_S = 1.0
PAUSE_S = 1.5
LATE_S = 0.5  # of running time, by which rank 3 is late
WAITING = "ranks wait"  # what the child prints where it is to be stopped


def be_late(rank):
    """Rank 3 sleeps, in slices: a pause of the process ends one of them."""
    if rank == 3:
        print(WAITING, flush=True)
        for _ in range(20):
            time.sleep(LATE_S / 20)
    return np.zeros((), jnp.bfloat16)


def late(tokens):
    """The tokens, but late on rank 3."""
    zero = jax.ShapeDtypeStruct((), tokens.dtype)
    return tokens + jax.pure_callback(be_late, zero, jax.lax.axis_index(AXIS))


def check_pauses(layer, n_repeats: int) -> int:
    """Of ranks that wait in dispatch, in combine, and in a backward pass."""
    with layer.open() as group:
        at_dispatch = layer.program(lambda x, i, w: layer.body(group, late(x), i, w))
        at_combine = layer.program(lambda x, i, w: layer.body(group, x, i, w, late))
        gradient = jax.grad(lambda x, i, w: loss(layer.body(group, late(x), i, w)))
        programs = [at_dispatch, at_combine, layer.program(gradient)]
        expected = [outcome(layer.forward)[0]] * 2 + [outcome(layer.backward)[0][: layer.n_ranks]]
        for _ in range(n_repeats):
            for program, right in zip(programs, expected, strict=True):
                values, errors = outcome(layer.call(program))
                assert not errors, errors
                assert_equal(values, right)
    return n_repeats * len(programs)


def loss(out):
    return jnp.sum(out.astype(jnp.float32))


def check_absence(layer) -> int:
    """Rank 3 never arrives; the process is stopped meanwhile, too."""

    def body(group, *operands):
        is_missing = jax.lax.axis_index(AXIS) == 3
        tokens = late(operands[0])
        return jax.lax.cond(is_missing, lambda: tokens, lambda: layer.body(group, *operands))

    with layer.open() as group:
        program = layer.program(lambda *operands: body(group, *operands))
        limit_s = PAUSE_S + LATE_S + TIMEOUT_S + 2
        with child.at_most(limit_s, "the call"):
            _, errors = outcome(layer.call(program))
        text = r"DEADLINE_EXCEEDED: .*dispatch of group \S+: ranks 0, 1, 2 waited 1 s for rank 3"
        assert errors and all(re.search(text, error) for error in errors), errors
    with layer.open():
        assert not outcome(layer.forward)[1]
    return 1


def main_of_child(quick: bool) -> None:
    layer = Layer(timeout_s=TIMEOUT_S)
    print(check_pauses(layer, 1 if quick else 6) + check_absence(layer), "faults")


def run_child_with_pauses(*args: str, limit_s: float) -> int:
    """Stops the child for a while wherever it says that ranks wait; returns how often."""
    process, log, n_pauses = child.start(__file__, *args), "", 0
    alarm = threading.Timer(limit_s * child.SLOWDOWN, process.kill)
    alarm.daemon = True
    alarm.start()
    for line in process.stdout:
        log += line
        if WAITING in line:
            time.sleep(LATE_S / 4)  # until the others wait
            process.send_signal(signal.SIGSTOP)
            time.sleep(PAUSE_S)
            process.send_signal(signal.SIGCONT)
            n_pauses += 1
    n_faults = child.n_faults(__file__, process.wait(), log)
    alarm.cancel()
    assert n_pauses == n_faults, f"{n_pauses} pauses\n{log}"
    return n_faults


if __name__ == "__main__":
    arguments = child.arguments()
    if arguments.child is None:
        flags = ["quick"] if arguments.quick else []
        n_faults = run_child_with_pauses(*flags, limit_s=180)
        print(f"pauses: {n_faults} faults, no crash, no hang")
        sys.exit()
    use_devices()
    main_of_child("quick" in arguments.child)
