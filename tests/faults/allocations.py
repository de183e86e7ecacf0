"""Lets the extension run out of memory at every allocation of a layer, forward and backward.

The n-th allocation of a call fails, for n = 1, 2, 3 ..., either alone or with all that follow. The
call must end for all ranks with an error that names call and rank, or succeed with the right
results, where the extension can do without that memory. `ep_init` and compilation must raise.
"""

import itertools
import re
import sys

from jax.errors import JaxRuntimeError

import child
import edges  # noqa: F401
import jax_ep
from failing import Failing
from layer import Layer, assert_equal, assert_right, outcome, use_devices

TIMEOUT_S = 5.0
N_POINTS = 100  # of each direction
NAMES = re.compile(
    r"RESOURCE_EXHAUSTED: .*((dispatch|combine) of group \S+: rank \d|fused_silu on device \d)"
)


def configurations(quick: bool) -> list[dict]:
    many_tokens = {"max_tokens_per_rank": 400, "timeout_s": TIMEOUT_S}  # in several chunks
    aligned = {"row_alignment": 32, "timeout_s": TIMEOUT_S + 1}
    quantized = {"token_format": jax_ep.MXFP8(scales_layout="atoms"), "timeout_s": TIMEOUT_S + 2}
    return [quantized] if quick else [many_tokens, aligned, quantized]


def check_point(layer, call, expected, failing, point: int, and_later: bool) -> bool:
    """Whether the call has an allocation of that number, which fails."""
    with layer.open():
        with child.at_most(layer.config.timeout_s + 2, "the call"):
            with failing.allocation(point, and_later=and_later):
                values, errors = outcome(call)
                n_allocations = failing.n_allocations
        if errors:
            # An error of one rank alone would have left the others waiting.
            assert not values or len(errors) % len(layer.mesh.devices.flat) == 0, errors
            for error in errors:
                # Without memory for the text, fused_silu's error is short on other devices.
                short = and_later and "a call of a jax_ep group: out of memory" in error
                assert short or NAMES.search(error), error
        else:
            assert_equal(values, expected)
    with layer.open():
        assert_right(call, expected)
    return n_allocations >= point


def check_direction(layers, name: str, n_points: int, stride: int, failing) -> int:
    done = 0
    while done < n_points:
        for layer in layers:
            call = getattr(layer, name)
            with layer.open():
                expected, errors = outcome(call)
                assert not errors, errors
            for and_later in (False, True):
                n_failed = 0
                while check_point(layer, call, expected, failing, 1 + n_failed * stride, and_later):
                    n_failed += 1
                print(f"{name}, {layer.config.token_format}: {n_failed} points", flush=True)
                done += n_failed
    return done


def check_setup(layer, attempt, error_type, text: str, stride: int, failing) -> int:
    """An attempt to open the group, or to compile, raises, whichever allocation fails."""
    for n_failed in itertools.count():
        point = 1 + n_failed * stride
        with failing.allocation(point):
            try:
                attempt()
            except error_type as error:
                assert re.search(text, str(error)), error
            else:
                assert failing.n_allocations < point, "an allocation has failed unnoticed"
                return n_failed
        with layer.open():
            assert not outcome(layer.forward)[1]


def check_opening(layer, stride: int, failing) -> int:
    attempt = lambda: layer.open().close()  # noqa: E731
    # The first attempts register the handlers, which is a call of XLA's.
    errors, text = (MemoryError, JaxRuntimeError), "bad_alloc|out of memory"
    n_points = check_setup(layer, attempt, errors, text, stride, failing)
    print(f"ep_init: {n_points} points", flush=True)
    return n_points


def check_compiling(layer, failing) -> int:
    with layer.open() as group:
        program = layer.program(lambda *operands: layer.body(group, *operands))
        lowered = program.lower(layer.tokens, layer.ids, layer.weights)
    text = r"RESOURCE_EXHAUSTED: .*(dispatch|combine): out of memory"
    n_points = check_setup(layer, lowered.compile, JaxRuntimeError, text, 1, failing)
    print(f"compiling: {n_points} points", flush=True)
    return n_points


def main_of_child(quick: bool) -> None:
    failing = Failing()
    layers = [Layer(**fields) for fields in configurations(quick)]
    n_points, stride = (1, 4) if quick else (N_POINTS, 1)
    done = [check_opening(layers[0], stride, failing), check_compiling(layers[0], failing)]
    for name in ("forward", "backward"):
        done.append(check_direction(layers, name, n_points, stride, failing))
    print(sum(done), "faults")


if __name__ == "__main__":
    arguments = child.arguments()
    if arguments.child is None:
        flags = ["quick"] if arguments.quick else []
        n_faults = child.run(__file__, *flags, timeout_s=60 if arguments.quick else 500)
        print(f"allocations: {n_faults} faults, no crash, no hang")
        sys.exit()
    use_devices()
    main_of_child("quick" in arguments.child)
