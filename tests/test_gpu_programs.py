"""What XLA makes of the calls on GPUs, by its compiler for GPUs, without a GPU.

Needs the extension for CUDA and JAX's plugin for it: `make gpu-programs`.
"""

from __future__ import annotations

import functools
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

import cases
import jax_ep
import suite
import test_transforms
from harness import AXIS, QUANTISED, config_of, on_mesh
from jax_ep import _cuda_ffi
from jax_ep.group import EPGroup
from jax_ep.transports.p2p import P2pTransport
from test_overlap_lowering import overlapping

CASE = test_transforms.CASE
# What the compiler knows of an H100 (SXM).
TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
runtime_version { major: 13 } dnn_version_info { major: 9 minor: 7 }
platform_name: "CUDA" device_description_str: "NVIDIA H100 80GB HBM3"
"""
CHECK = "jax_ep_check"
# What takes no time.
FREE = ("bitcast", "constant", "get-tuple-element", "parameter", "tuple")


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    try:
        _cuda_ffi.register()
        devices = topologies.get_topology_desc(
            "four", "cuda", target_config=TARGET, topology="1x1x4"
        ).devices
    except (ImportError, NotImplementedError) as error:
        if "JAX_EP_TEST_GPU_PROGRAMS" in os.environ:  # who asks for it has it
            raise
        pytest.skip(f"needs `make gpu-programs`: {error}")
    return jax.sharding.Mesh(np.array(devices), (AXIS,))


@pytest.fixture
def make_group(mesh, monkeypatch):
    """Groups of GPUs that are not there: enough to compile their calls."""
    monkeypatch.setattr(P2pTransport, "open", lambda *_: None)
    return lambda config: EPGroup(mesh, AXIS, config, P2pTransport(), None)


def compiled(mesh, body, n_operands: int = 2, case=CASE):
    """The program of a function of a rank's tokens, ids and weights."""
    sharding = jax.NamedSharding(mesh, jax.P(AXIS))
    types = operand_types(n_operands, case, sharding)
    options = {"xla_gpu_autotune_level": "0"}  # it would run what it compares
    return on_mesh(mesh, body).lower(*types).compile(compiler_options=options)


def operand_types(n_operands: int = 2, case=CASE, sharding=None):
    arrays = suite.make_inputs(case).arrays()[:n_operands]
    return [
        jax.ShapeDtypeStruct((len(x), *x[0].shape), x[0].dtype, sharding=sharding)
        for x in arrays
    ]


def computations(program) -> list[list[str]]:
    """What the computations that hold a call of ours do, in scheduled order."""
    found = []
    for text in re.split(r"\n(?=(?:ENTRY )?%[\w.\-]+ \()", program.as_text()):
        steps = []
        for line in text.splitlines():
            step = re.match(r"\s+(?:ROOT )?%\S+ = .*? ([a-z\-]+)\(", line)
            target = re.search(r'custom_call_target="([^"]+)"', line)
            if target or (step and step[1] not in FREE):
                steps.append(target[1] if target else step[1])
        if any("jax_ep" in step or step == "call-start" for step in steps):
            found.append(steps)
    return found


def test_the_calls_of_a_program_come_behind_one_check(mesh, make_group) -> None:
    group = make_group(config_of(CASE))

    def chain(tokens, topk_ids):
        for _ in range(3):
            rows = jax_ep.dispatch(group, tokens, topk_ids)
            tokens = jnp.tanh(jax_ep.combine(group, rows.tokens, rows))
        return tokens

    program = compiled(mesh, chain)
    (steps,) = computations(program)
    ours = [step for step in steps if "jax_ep" in step]
    assert ours == [CHECK, *["jax_ep_dispatch", "jax_ep_combine"] * 3]
    (check,) = re.findall(rf'(%\S+) = s32\[\] .*"{CHECK}"', program.as_text())
    target = r'custom_call_target="jax_ep_(?!check)'
    calls = re.findall(rf"custom-call\((%[^,]+), .*{target}", program.as_text())
    assert calls == [check] * 6


def test_a_loop_checks_in_each_turn(mesh, make_group) -> None:
    group = make_group(config_of(CASE))

    def turn(tokens, topk_ids):
        rows = jax_ep.dispatch(group, tokens, topk_ids)
        return jnp.tanh(jax_ep.combine(group, rows.tokens, rows))

    def loop(tokens, topk_ids):
        return jax.lax.scan(lambda x, _: (turn(x, topk_ids), None), tokens, length=3)[0]

    (steps,) = computations(compiled(mesh, loop))
    ours = [step for step in steps if "jax_ep" in step]
    assert ours == [CHECK, "jax_ep_dispatch", "jax_ep_combine"]


def test_rematerialisation_makes_and_saves_the_calls_that_it_should(
    mesh, make_group
) -> None:
    """As tests/test_transforms.py, which runs the programs."""
    group, t = make_group(config_of(CASE)), test_transforms
    keep = jax.checkpoint_policies.save_only_these_names
    wraps = {
        "plain": {},
        "again": {"wrap": t.checkpointed()},
        "kept": {"wrap": t.checkpointed(policy=keep(jax_ep.DISPATCH_NAME))},
        "all kept": {"wrap": t.checkpointed(policy=keep(*t.NAMES))},
    }
    calls = {
        name: t.n_calls(compiled(mesh, t.layers(group, **wrap), 3))
        for name, wrap in wraps.items()
    }
    assert calls["plain"] == calls["kept"] == calls["all kept"], calls
    assert calls["again"] == calls["plain"] + t.N_LAYERS, calls


def test_calls_are_neither_kept_without_use_nor_doubled(mesh, make_group) -> None:
    group, t = make_group(config_of(CASE)), test_transforms

    def unused(tokens, topk_ids):
        jax_ep.dispatch(group, tokens, topk_ids)
        return tokens

    def halves(tokens, topk_ids):
        outs = []
        for half in (slice(0, 8), slice(8, 16)):
            rows = jax_ep.dispatch(group, tokens[half], topk_ids[half])
            outs.append(jax_ep.combine(group, rows.tokens, rows))
        return jnp.concatenate(outs)

    assert computations(compiled(mesh, unused)) == []
    assert t.n_calls(compiled(mesh, halves)) == 4


@pytest.mark.parametrize("in_loop", [False, True])
def test_work_stands_between_the_ends_of_calls(mesh, make_group, in_loop) -> None:
    """And behind the sign that the call has its multiprocessors."""
    group = make_group(config_of(CASE, n_sms=16))

    def straight(tokens, topk_ids):
        return overlapping(group, tokens, topk_ids)[: len(tokens)]

    def loop(tokens, topk_ids):
        return jax.lax.scan(
            lambda x, _: (straight(x, topk_ids), None), tokens, length=2
        )[0]

    found = computations(compiled(mesh, loop if in_loop else straight))
    steps = max(found, key=len)
    assert sorted(map(len, found))[:2] == [1, 1]  # what runs on the other stream
    assert len(in_flight(steps)) == 2
    for beside in in_flight(steps):
        assert beside[0] == "jax_ep_await_begin"
        assert "fusion" in beside, steps
    assert steps.index("jax_ep_dispatch_end") > steps.index("call-done")
    assert steps.count(CHECK) == 1 and steps.index(CHECK) < steps.index("call-start")


def deep_layers(group, tokens, topk_ids):
    """Work whose result nothing adds to the call's."""
    y, beside = tokens, []
    for _ in range(2):
        rows = jax_ep.dispatch(group, tokens, topk_ids)
        flight = jax_ep.combine_async(group, rows.tokens, rows)
        y = flight.then(y)
        for _ in range(2):
            y = jnp.tanh(y @ y.T @ y)
        tokens = jax_ep.combine_wait(group, flight, after=y)
        beside.append(y)
    return tokens, beside


def two_layers(group, tokens, topk_ids):
    matrix = jnp.ones((tokens.shape[1],) * 2, tokens.dtype)
    for _ in range(2):
        tokens = layer(group, tokens, topk_ids, matrix)
    return tokens


def layer(group, tokens, topk_ids, matrix):
    flight = jax_ep.dispatch_async(group, tokens, topk_ids)
    beside = jnp.tanh(flight.then(tokens) @ matrix)
    rows = jax_ep.dispatch_wait(group, flight, after=beside)
    matrices = jnp.broadcast_to(matrix, (len(rows.group_sizes), *matrix.shape))
    out = jax.lax.ragged_dot(rows.tokens, matrices, rows.group_sizes)
    flight = jax_ep.combine_async(group, out, rows, residual=beside)
    more = jnp.tanh(flight.then(beside) @ matrix)
    return jax_ep.combine_wait(group, flight, after=more) + more


def gradient_of_loop(group, tokens, topk_ids):
    def loss(tokens, matrices):
        def turn(x, matrix):
            return layer(group, x, topk_ids, matrix), None

        return jnp.sum(jax.lax.scan(turn, tokens, matrices)[0].astype(jnp.float32))

    shape = 3, tokens.shape[1], tokens.shape[1]
    matrices = jnp.ones(shape, tokens.dtype) * tokens[0]
    return jax.grad(loss, argnums=(0, 1))(tokens, matrices)


def combine_in_a_loop(group, tokens, topk_ids):
    rows = jax_ep.dispatch(group, tokens, topk_ids)

    def turn(y, _):
        flight = jax_ep.combine_async(group, rows.tokens * y[0], rows)
        more = jnp.tanh(flight.then(y) @ y.T @ y)
        return jax_ep.combine_wait(group, flight, after=more) + more, None

    return jax.lax.scan(turn, tokens, length=3)[0]


@pytest.mark.parametrize(
    "program", [deep_layers, two_layers, gradient_of_loop, combine_in_a_loop]
)
@pytest.mark.parametrize("shared", [False, True])
def test_no_work_comes_before_the_call_that_it_stands_beside(
    mesh, make_group, program, shared
) -> None:
    """Wherever operands, buffers and check come from; and it does stand beside it."""
    case = CASE.but(fused_shared_expert=shared)
    group = make_group(config_of(case, n_sms=16))
    text = compiled(mesh, functools.partial(program, group), case=case)
    n_found = 0
    for steps in computations(text):
        for found in in_flight(steps):
            assert found[0] == "jax_ep_await_begin", steps
            assert any(s == "fusion" or s.startswith("__cublas") for s in found), steps
            n_found += 1
        assert "".join(steps).count("await_begin") == len(in_flight(steps)), steps
    assert n_found


@pytest.mark.parametrize("place", ["one device", "nvfp4"])
def test_numbers_that_xla_knows_may_be_operands_of_pairs(
    mesh, monkeypatch, place
) -> None:
    """XLA of jax 0.12 does not compile a pair that has a constant as operand."""
    monkeypatch.setattr(P2pTransport, "open", lambda *_: None)
    if place == "one device":
        case, mesh = cases.SMALL[1], jax.sharding.Mesh(mesh.devices[:1], (AXIS,))
    else:
        case = cases.QUANTISED_SMALL[place]
    config = config_of(case, n_sms=16)
    group = EPGroup(mesh, AXIS, config, P2pTransport(), None)

    def body(tokens, topk_ids):
        flight = jax_ep.dispatch_async(group, tokens, topk_ids)
        beside = jnp.tanh(flight.then(tokens))
        rows = jax_ep.dispatch_wait(group, flight, after=beside)
        out = jax_ep.dequantize(rows).astype(config.combine_dtype)
        flight = jax_ep.combine_async(group, out, rows)
        more = jnp.sin(flight.then(beside))
        return jax_ep.combine_wait(group, flight, after=more), more

    steps = max(computations(compiled(mesh, body, case=case)), key=len)
    assert [found[0] for found in in_flight(steps)] == ["jax_ep_await_begin"] * 2


def in_flight(steps: list[str]) -> list[list[str]]:
    """What stands between the start of each call and its end.

    But for stores of what a scan stacks, beside which XLA does something else, too.
    """
    steps = [step for step in steps if step not in ("fusion-start", "fusion-done")]
    starts = [i for i, step in enumerate(steps) if step == "call-start"]
    dones = [i for i, step in enumerate(steps) if step == "call-done"]
    return [steps[start + 1 : done] for start, done in zip(starts, dones, strict=True)]


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_loop_that_stacks_results_makes_each_call_once(
    mesh, make_group, overlaps
) -> None:
    """XLA fuses what stores in a larger array with a copy of a call, if it may."""
    group = make_group(config_of(CASE))

    def turn(tokens, topk_ids):
        if overlaps:
            flight = jax_ep.dispatch_async(group, tokens, topk_ids)
            rows = jax_ep.dispatch_wait(group, flight)
            flight = jax_ep.combine_async(group, 2 * rows.tokens, rows)
            out = jax_ep.combine_wait(group, flight)
        else:
            rows = jax_ep.dispatch(group, tokens, topk_ids)
            out = jax_ep.combine(group, 2 * rows.tokens, rows)
        acts = jax_ep.fused_silu(rows.tokens, rows.row_offsets)
        return out, (out, rows.tokens, rows.layout, acts, acts.sum())

    def loop(tokens, topk_ids):
        return jax.lax.scan(lambda x, _: turn(x, topk_ids), tokens, length=3)

    program = compiled(mesh, loop)
    targets = re.findall(r'custom_call_target="jax_ep_(\w+)"', program.as_text())
    halves = ["reserve", "dispatch_begin", "dispatch_end", "combine_beside"]
    calls = halves if overlaps else ["dispatch", "combine"]
    assert sorted(targets) == sorted(["check", "fused_silu", *calls])
    assert "copy" not in max(computations(program), key=len)


@pytest.mark.parametrize(
    "kept", [(), (jax_ep.DISPATCH_NAME,), (jax_ep.DISPATCH_NAME, jax_ep.COMBINE_NAME)]
)
def test_gradients_of_calls_that_overlap_make_each_call_once(
    mesh, make_group, kept
) -> None:
    """In straight code and in a loop, also where a policy keeps the results."""
    group = make_group(config_of(CASE, n_sms=16))
    keep = jax.checkpoint_policies.save_only_these_names(*kept)
    wrap = functools.partial(jax.checkpoint, policy=keep) if kept else lambda f: f
    one = wrap(functools.partial(overlapping, group))

    def straight(tokens, topk_ids):
        return jnp.sum(one(one(tokens, topk_ids), topk_ids).astype(jnp.float32))

    def loop(tokens, topk_ids):
        def turn(x, _):
            return one(x, topk_ids), None

        return jnp.sum(jax.lax.scan(turn, tokens, length=2)[0].astype(jnp.float32))

    for body, n_layers in ((straight, 2), (loop, 1)):
        text = compiled(mesh, jax.grad(body)).as_text()
        for target in ("reserve", "dispatch_begin", "dispatch_end"):
            assert text.count(f'custom_call_target="jax_ep_{target}"') == n_layers
        # Nobody needs the result of the last layer.
        n_combines = text.count('custom_call_target="jax_ep_combine_beside"')
        assert n_combines == 1


def test_calls_that_overlap_have_no_second_derivative(mesh, make_group) -> None:
    """As whole calls; not one of zeros."""
    group = make_group(config_of(CASE))

    def dispatched(tokens, topk_ids):
        flight = jax_ep.dispatch_async(group, tokens, topk_ids)
        return jnp.sum(jax_ep.dispatch_wait(group, flight).tokens ** 3)

    def combined(tokens, topk_ids):
        rows = jax_ep.dispatch(group, jax.lax.stop_gradient(tokens), topk_ids)
        flight = jax_ep.combine_async(group, rows.tokens * tokens[0], rows)
        return jnp.sum(jax_ep.combine_wait(group, flight) ** 3)

    for body in (dispatched, combined):
        jax.eval_shape(on_mesh(mesh, jax.grad(body)), *operand_types())
        twice = jax.grad(lambda x, i, f=body: jnp.sum(jax.grad(f)(x, i)))
        with pytest.raises(NotImplementedError, match="jax_ep_awaited"):
            jax.eval_shape(on_mesh(mesh, twice), *operand_types())


@pytest.mark.parametrize("name", [*QUANTISED])
def test_quantising_is_a_part_of_dispatch(name, mesh, make_group) -> None:
    case = cases.QUANTISED_SMALL[name]
    group = make_group(config_of(case))

    def body(tokens, topk_ids):
        rows = jax_ep.dispatch(group, tokens, topk_ids)
        acts = jax_ep.fused_silu(
            jax_ep.dequantize(rows), rows.row_offsets, jax_ep.MXFP8()
        )
        return rows.tokens, acts.tokens

    (steps,) = computations(compiled(mesh, body, case=case))
    ours = [step for step in steps if "jax_ep" in step]
    assert ours == [CHECK, "jax_ep_dispatch", "jax_ep_fused_silu"]
