"""Programs made by hand, and changed results of dispatch, on CPUs.

Every fault must end in an error that names the call, or merely in other numbers where what was
changed may have been meant. It must neither crash nor hang, and the next group must work.

    python tests/faults/tampered.py [--quick]
"""

import argparse
import dataclasses
import functools
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir

import child
import edges  # noqa: F401
import handmade
import jax_ep

R, E, K, H, T = 4, 8, 2, 16, 4
TIMEOUT_S = 3.0
SLACK_S = 15.0  # of a machine that others load
SILENCE_S = 120.0  # in which a fault, its compilation included, must end
QUICK = 9  # every so many faults are in the sample

DISPATCH, COMBINE, GRAD = "jax_ep_dispatch", "jax_ep_combine", "jax_ep_combine_grad"
N_OPERANDS = {DISPATCH: 3, COMBINE: 6, GRAD: 8}  # of the first call, with weights at the source
NAMES = {DISPATCH: "dispatch", COMBINE: "combine", GRAD: "the backward of combine"}
CHANGED = "dispatched must be the unchanged result of a dispatch of this group"


@dataclasses.dataclass(frozen=True)
class Fault:
    """A change, and what the error must say; None: there need not be an error."""

    name: str
    expected: str | None
    edit: Callable[[jax.stages.Lowered], None] = lambda lowered: None
    change: Callable[[Any], Any] = lambda dispatched: dispatched
    weights: str = "source"  # or at the "row", or "none"


def layer(change, at, group, tokens, topk_ids, weights, residual):
    """A layer and its gradients on one rank."""

    def loss(tokens, weights):
        to_dispatch = (weights,) if at == "row" else ()
        to_combine = (weights,) if at == "source" else ()
        dispatched = change(jax_ep.dispatch(group, tokens, topk_ids, *to_dispatch))
        out = jax_ep.combine(
            group, jnp.tanh(dispatched.tokens), dispatched, *to_combine, residual=residual
        )
        return jnp.sum(out.astype(jnp.float32))

    value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(tokens, weights)
    return value[None], gradients


@functools.cache
def mesh() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:R]), ("ep",))


@functools.cache
def operands() -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(3)
    tokens, residual = random.normal(size=(2, R * T, H))
    ids = np.argsort(random.random((R * T, E)))[:, :K].astype(np.int32)
    weights = random.random((R * T, K), np.float32)
    return tokens.astype(jnp.bfloat16), ids, weights, residual.astype(jnp.bfloat16)


def open_group() -> jax_ep.EPGroup:
    config = jax_ep.EPConfig(
        n_experts=E, top_k=K, hidden_size=H, max_tokens_per_rank=T, timeout_s=TIMEOUT_S
    )
    return jax_ep.ep_init(mesh(), "ep", config, "host")


def lower(group, change=lambda d: d, weights: str = "source") -> jax.stages.Lowered:
    spec = jax.P("ep")
    body = functools.partial(layer, change, weights, group)
    mapped = jax.shard_map(body, mesh=mesh(), in_specs=spec, out_specs=spec)
    return jax.jit(mapped).lower(*operands())


def attribute_faults() -> Iterator[Fault]:
    def each(target: str, name: str, value: str, expected: str | None) -> Fault:
        def edit(lowered):
            for call in handmade.calls(lowered, target):
                handmade.set_attribute(call, name, value)

        return Fault(f"{target}: {name} = {value}", expected, edit)

    for target in (COMBINE, GRAD):
        for value in (-(2**31), -1, 3, 255, 2**31 - 1):
            expected = f"combine: weighting must be from 0 to 2; got {value}"
            yield each(target, "weighting", f"{value} : i32", expected)
        for value in ("1 : i64", "1.0 : f32", '"source"', "true"):
            yield each(target, "weighting", value, "(?i)wrong")
        for value in (0, 2):
            yield each(target, "weighting", f"{value} : i32", rf"{NAMES[target]} .* must ")
        yield each(target, "reduce", "false", rf"{NAMES[target]} .* must have the shape")
        yield each(target, "reduce", "1 : i32", "(?i)wrong")
        yield each(target, "adds_shared_expert", "true", None)
    for name in ("token_format", "scales_layout"):
        yield each(DISPATCH, name, '"another"', f"dispatch .* {name} must be ")
    yield each(DISPATCH, "token_format", '"mxfp8"', "dispatch .* scales_layout must be ")
    yield each(DISPATCH, "token_format", '"plain_float16"', "dispatch .* must be float16")
    for target, name in NAMES.items():
        yield each(target, "group", '"another"', f"{name} of group another: .* not open")
        yield each(target, "unknown", "1 : i32", "(?i)attribute")
    for value in (-1, 3, 255):  # with the operands that a weighting by row or source would have
        yield unweighted_fault(value)


def unweighted_fault(value: int) -> Fault:
    def edit(lowered):
        (call,) = handmade.calls(lowered, GRAD)
        handmade.set_attribute(call, "weighting", f"{value} : i32")
        expert_out = handmade.filled(call, [R * T * K, H], "bf16")
        weights = handmade.filled(call, [T, K], "f32")
        handmade.set_operands(call, [*call.operands, expert_out, weights][: 7 + (value == 3)])

    expected = f"combine: weighting must be from 0 to 2; got {value}"
    return Fault(f"{GRAD}: weighting {value} without weights", expected, edit, weights="none")


def operand_faults() -> Iterator[Fault]:
    def each(target: str, what: str, expected: str | None, change) -> Fault:
        def edit(lowered):
            call = handmade.calls(lowered, target)[0]
            handmade.set_operands(call, change(call, list(call.operands)))

        return Fault(f"{target}: {what}", expected, edit)

    def other(i: int, of_shape, element_type: str | None, call, values):
        own = ir.RankedTensorType(values[i].type)
        values[i] = handmade.filled(
            call, of_shape(own.shape), element_type or str(own.element_type)
        )
        return values

    def swap(i: int, _, values):
        values[i : i + 2] = values[i + 1], values[i]
        return values

    def elsewhere(value: int, call, values):
        return [handmade.filled(call, [], "i32", value), *values[1:]]

    for target, n in N_OPERANDS.items():
        for value in (-(2**31), -1, R, 2**31 - 1):
            message = f"{NAMES[target]} .* of the group, but .* of the mesh"
            yield each(target, f"coordinate {value}", message, functools.partial(elsewhere, value))
        must = f"{NAMES[target]} .* must "
        yield each(target, "no operands", must, lambda call, values: [])
        yield each(target, "another operand", must, lambda call, values: values + values[:1])
        yield each(target, "30 operands", must, lambda call, values: (values * 10)[:30])
        for i in range(n):
            is_optional = (target, i) == (COMBINE, 5)  # residual
            fewer = lambda _, values, i=i: values[:i] + values[i + 1 :]  # noqa: E731
            yield each(target, f"without {i}", None if is_optional else must, fewer)
            if i + 1 < n:
                yield each(target, f"{i} and {i + 1} swapped", None, functools.partial(swap, i))
            for what, of_shape, element_type in (
                ("longer", lambda shape: [size + 1 for size in shape] or [1], None),
                ("empty", lambda shape: [0] * max(len(shape), 1), None),
                ("int8", list, "i8"),
            ):
                change = functools.partial(other, i, of_shape, element_type)
                yield each(target, f"{i} {what}", must, change)


def alias_faults() -> Iterator[Fault]:
    """Results in the memory of operands that have their type."""

    def each(target: str, operand: int, result: int, weights: str = "source") -> Fault:
        def edit(lowered):
            handmade.alias(handmade.calls(lowered, target)[0], operand, result)

        what = f"operand {operand} in the memory of result {result}"
        text = f"{NAMES[target]} .* must not share memory .* {what}"
        name = f"{target}: operand {operand} is result {result}, weights at {weights}"
        return Fault(name, text, edit, weights=weights)

    yield each(DISPATCH, 2, 5)  # group_ids, dst_rows
    yield each(DISPATCH, 0, 3)  # coordinate, n_dropped
    yield each(COMBINE, 5, 0)  # residual
    yield each(GRAD, 6, 0)  # expert_out and its gradient
    yield each(GRAD, 7, 1)  # topk_weights and their gradient
    yield each(GRAD, 7, 1, weights="row")  # row_weights and theirs


def result_faults() -> Iterator[Fault]:
    """A changed handle, and other changed fields; also those of another dispatch."""
    n_rows = R * T * K

    def each(field: str, what: str, expected: str | None, of_field) -> Fault:
        def change(dispatched):
            value = getattr(dispatched, field)
            return dataclasses.replace(dispatched, **{field: of_field(value)})

        return Fault(f"{field}: {what}", expected, change=change)

    combine = f"combine of group .*{CHANGED}; choice"
    for value in (-(2**31), -1000, -2, n_rows, n_rows + 1, 2**20, 2**31 - 1):
        yield each("handle", f"all {value}", combine, lambda x, v=value: jnp.full_like(x, v))
        yield each("handle", f"one {value}", combine, lambda x, v=value: x.at[1, 1].set(v))
    yield each("handle", "+10000", combine, lambda x: x + 10_000)
    yield each("handle", "negative", combine, lambda x: -x - 2)
    yield each("handle", "all 0", None, jnp.zeros_like)
    yield each("handle", "all -1", None, lambda x: jnp.full_like(x, -1))
    yield each("handle", "reversed", None, lambda x: x[::-1])
    for value in (-(2**31), -5, -1, E, 2**31 - 1):
        yield each("topk_ids", f"all {value}", combine, lambda x, v=value: jnp.full_like(x, v))
    yield each("topk_ids", "rolled", None, lambda x: (x + 3) % E)
    yield each("topk_ids", "all 0", None, jnp.zeros_like)
    offsets = f"the backward of combine of group .*{CHANGED}; row_offsets must rise"
    yield each("row_offsets", "+10000", offsets, lambda x: x + jnp.uint32(10_000))
    yield each("row_offsets", "-1", offsets, lambda x: jnp.full_like(x, 2**32 - 1))
    yield each("row_offsets", "last + 2 ** 31", offsets, lambda x: x.at[-1].add(2**31))
    yield each("row_offsets", "falling", offsets, lambda x: x.at[1].set(n_rows + 5))
    yield each("row_offsets", "first 1", offsets, lambda x: x.at[0].set(1))
    yield each("row_offsets", "all 0", None, jnp.zeros_like)
    for value in (-(2**31), -7, 2**31 - 1):
        yield each("src_info", f"all {value}", None, lambda x, v=value: jnp.full_like(x, v))


def all_faults() -> dict[str, Fault]:
    makers = (attribute_faults, operand_faults, alias_faults, result_faults)
    faults = [fault for make in makers for fault in make()]
    by_name = {fault.name: fault for fault in faults}
    assert len(by_name) == len(faults)
    return by_name


def run_fault(fault: Fault) -> str:
    """The error; '' if there is none."""
    group = open_group()
    try:
        lowered = lower(group, fault.change, fault.weights)
        fault.edit(lowered)
        program = lowered.compile()
        begin = time.monotonic()
        try:
            jax.block_until_ready(program(*operands()))
        finally:
            seconds = time.monotonic() - begin
            assert seconds < TIMEOUT_S + 2 + SLACK_S, f"took {seconds:.1f} s"
    except jax.errors.JaxRuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        group.close()
    return ""


def run_faults(names: list[str]) -> None:
    """Runs faults one after the other, in a process that the first crash ends."""
    with open_group() as group:
        healthy = lower(group).compile()
        wanted = jax.device_get(healthy(*operands()))
    faults = all_faults()
    for name in names:
        print(f"begin {name}", flush=True)
        fault, error = faults[name], run_fault(faults[name])
        if fault.expected is not None and not re.search(fault.expected, error, re.DOTALL):
            print(f"failed {name}: wanted {fault.expected!r}, got {error!r}", flush=True)
        with open_group():
            got = jax.device_get(healthy(*operands()))
        same = jax.tree.map(np.array_equal, got, wanted)
        if not all(jax.tree.leaves(same)):
            print(f"failed {name}: the next group gives other results", flush=True)
        print(f"end {name}", flush=True)


def watch(names: list[str]) -> tuple[list[str], list[str]]:
    """Runs faults in a process. Returns what went wrong, and the faults that it did not reach."""
    process = subprocess.Popen(
        [*child.PYTHON, __file__, "--faults", *names], stdout=subprocess.PIPE, text=True
    )
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in process.stdout:
            lines.put(line.rstrip("\n"))
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    wrong, running, left = [], "the first group", list(names)
    while True:
        try:
            line = lines.get(timeout=SILENCE_S)
        except queue.Empty:
            process.kill()
            wrong.append(f"{running}: hangs")
            break
        if line is None:
            break
        kind, _, rest = line.partition(" ")
        if kind == "begin":
            running = rest
            left.remove(rest)
        elif kind == "failed":
            wrong.append(rest)
    status = process.wait(timeout=SILENCE_S)
    if status and not (wrong and wrong[-1].endswith("hangs")):
        wrong.append(f"{running}: exit status {status}")
        if running == "the first group":
            left = []
    return wrong, left


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a sample of the faults")
    parser.add_argument("--faults", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("PJRT_NPROC", str(4 * R))  # enough threads for all ranks
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", R)
    if options.faults:
        run_faults(options.faults)
        return 0
    names = list(all_faults())[:: QUICK if options.quick else 1]
    wrong, left = [], names
    while left:
        more, left = watch(left)
        wrong += more
    for each in wrong:
        print(each)
    if wrong:
        print(f"tampered: {len(names)} faults, {len(wrong)} went wrong")
        return 1
    print(f"tampered: {len(names)} faults, no crash, no hang")
    return 0


if __name__ == "__main__":
    sys.exit(main())
