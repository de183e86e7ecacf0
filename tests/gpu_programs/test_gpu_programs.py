"""Programs with our calls as XLA compiles them for GPUs; needs no GPU.

Needs the CUDA extension and JAX's CUDA plugin; `make gpu-programs` installs the latter.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import async_layers
import cases
import jax_ep
import suite
import transformed_calls
from gpu_compiler import (
    CASE,
    CHECK,
    check_overlap,
    compiled,
    computations,
    group_of,
    operand_types,
    our_steps,
    while_in_flight,
)
from gpu_compiler import make_group as make_group
from gpu_compiler import mesh as mesh
from harness import AXIS, QUANTIZED_FORMATS, config_of, on_mesh


def scanned(layer, length: int = 3):
    """A loop whose iterations pass the layer's result on as the tokens of the next."""

    def loop(tokens, topk_ids):
        return jax.lax.scan(lambda x, _: (layer(x, topk_ids), None), tokens, length=length)[0]

    return loop


def test_all_calls_of_a_program_share_one_check(mesh, make_group) -> None:
    group = make_group(config_of(CASE))

    def chain(tokens, topk_ids):
        for _ in range(3):
            rows = jax_ep.dispatch(group, tokens, topk_ids)
            tokens = jnp.tanh(jax_ep.combine(group, rows.tokens, rows))
        return tokens

    program = compiled(mesh, chain)
    (steps,) = computations(program)
    assert our_steps(steps) == [CHECK, *["jax_ep_dispatch", "jax_ep_combine"] * 3]
    (check,) = re.findall(rf'(%\S+) = s32\[\] .*"{CHECK}"', program.as_text())
    target = r'custom_call_target="jax_ep_(?!check)'
    calls = re.findall(rf"custom-call\((%[^,]+), .*{target}", program.as_text())
    assert calls == [check] * 6


def test_balance_is_two_kernels_and_an_exchange_of_counts(mesh, make_group) -> None:
    """Beside the rank, which a program reads once."""
    case = CASE.replace(expert_copies=2)
    group = make_group(config_of(case))

    def dispatch(tokens, topk_ids):
        rows = jax_ep.dispatch(group, tokens, topk_ids)
        return rows.tokens, rows.copies

    (steps,) = computations(compiled(mesh, dispatch, case=case))
    calls = [f"jax_ep_{name}" for name in ("count_choices", "balance_choices", "dispatch")]
    exchange = ["all-gather-start", "all-gather-done"]
    assert sorted(steps) == sorted([*calls, *exchange, CHECK, "fusion", "partition-id"])


def test_a_loop_checks_in_each_iteration(mesh, make_group) -> None:
    group = make_group(config_of(CASE))

    def layer(tokens, topk_ids):
        rows = jax_ep.dispatch(group, tokens, topk_ids)
        return jnp.tanh(jax_ep.combine(group, rows.tokens, rows))

    (steps,) = computations(compiled(mesh, scanned(layer)))
    assert our_steps(steps) == [CHECK, "jax_ep_dispatch", "jax_ep_combine"]


def test_rematerialization_repeats_only_calls_that_no_policy_saves(mesh, make_group) -> None:
    """As in tests/exchange/test_transforms.py, which runs the programs."""
    group = make_group(config_of(CASE))
    calls = {
        name: transformed_calls.n_calls(compiled(mesh, transformed_calls.layers(group, wrap), 3))
        for name, wrap in transformed_calls.CHECKPOINTED.items()
    }
    assert calls["plain"] == calls["dispatch saved"] == calls["both saved"], calls
    assert calls["nothing saved"] == calls["plain"] + transformed_calls.N_LAYERS, calls


@pytest.mark.parametrize("name", ["plain", "blockwise_fp8"])
def test_a_layer_is_four_kernels_and_three_times_as_many_matmuls_with_gradients(
    mesh, make_group, name
) -> None:
    """XLA drops what `expert_mlp` computes for the gradients of codes only."""
    case = CASE.replace(hidden_size=1024, token_format=name)
    group, n_local = make_group(config_of(case)), case.n_experts // case.n_ranks
    quantizes = case.token_format in QUANTIZED_FORMATS

    def weights():
        shapes = (n_local, 1024, 12800), (n_local, 6400, 1024)
        matrices = [jnp.ones(shape, jnp.bfloat16) for shape in shapes]
        return [jax_ep.quantize_weights(x) for x in matrices] if quantizes else matrices

    def layer(tokens, topk_ids, gate_up, down):
        rows = jax_ep.dispatch(group, tokens, topk_ids)
        results = jax_ep.expert_mlp(rows, gate_up, down)
        return jax_ep.combine(group, results, rows)

    def gradients(tokens, topk_ids):
        def of_floats(tokens, *sources):
            matrices = map(jax_ep.quantize_weights, sources) if quantizes else sources
            return layer(tokens, topk_ids, *matrices)

        sources = [x.source if quantizes else x for x in weights()]
        out, pull = jax.vjp(of_floats, tokens, *sources)
        return pull(out)

    matmul = "jax_ep_grouped_matmul"
    experts = ["jax_ep_gated_scaled_matmul" if quantizes else "jax_ep_gated_matmul", matmul]
    (steps,) = computations(compiled(mesh, lambda *x: layer(*x, *weights()), case=case))
    assert our_steps(steps) == [CHECK, "jax_ep_dispatch", *experts, "jax_ep_combine"]
    (steps,) = computations(compiled(mesh, gradients, case=case))
    assert sum("matmul" in step for step in our_steps(steps)) == 6


def test_the_bias_of_the_first_matmul_needs_no_pass(mesh, make_group) -> None:
    """Unlike that of the second one, which a fusion adds."""
    case = CASE.replace(hidden_size=128)
    group, n_local = make_group(config_of(case)), case.n_experts // case.n_ranks
    sizes = {"gate_up": (128, 256), "gate_up_bias": (256,), "down": (128, 128), "down_bias": (128,)}
    rng = np.random.default_rng(0)  # XLA would make arrays of ones in fusions
    arrays = {
        name: rng.standard_normal((n_local, *shape)).astype(jnp.bfloat16)
        for name, shape in sizes.items()
    }

    def steps_with(*biases):
        def layer(tokens, topk_ids):
            rows = jax_ep.dispatch(group, tokens, topk_ids)
            given = {name: arrays[name] for name in ("gate_up", "down", *biases)}
            return jax_ep.combine(group, jax_ep.expert_mlp(rows, **given), rows)

        (steps,) = computations(compiled(mesh, layer, case=case))
        return our_steps(steps), steps.count("fusion")

    _, n_fusions = steps_with()
    calls, n_with_first = steps_with("gate_up_bias")
    assert "jax_ep_gated_matmul" in calls and n_with_first == n_fusions
    _, n_with_second = steps_with("down_bias")
    assert n_with_second > n_fusions
    assert steps_with("gate_up_bias", "down_bias")[1] == n_with_second


def test_unused_calls_are_dropped_and_no_call_runs_twice(mesh, make_group) -> None:
    group = make_group(config_of(CASE))

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
    assert transformed_calls.n_calls(compiled(mesh, halves)) == 4


@pytest.mark.parametrize("in_loop", [False, True])
def test_overlapped_work_is_scheduled_between_start_and_done(mesh, make_group, in_loop) -> None:
    """And after the wait until the call is resident on the GPU."""
    group = make_group(config_of(CASE, n_sms=16))

    def straight(tokens, topk_ids):
        return async_layers.overlapped_layer(group, tokens, topk_ids)[: len(tokens)]

    found = computations(compiled(mesh, scanned(straight, 2) if in_loop else straight))
    steps = max(found, key=len)
    assert sorted(map(len, found))[:2] == [1, 1]  # the two calls on the other stream
    assert len(while_in_flight(steps)) == 2
    for beside in while_in_flight(steps):
        assert beside[0] == "jax_ep_wait_started"
        assert "fusion" in beside, steps
    assert steps.index("jax_ep_async_done") > steps.index("call-done")
    assert steps.count(CHECK) == 1 and steps.index(CHECK) < steps.index("call-start")


@pytest.mark.parametrize("program", async_layers.PROGRAMS)
@pytest.mark.parametrize("shared", [False, True])
def test_no_overlapped_work_runs_before_its_call(mesh, make_group, program, shared) -> None:
    """It overlaps with the call, wherever operands, buffers and check come from."""
    case = CASE.replace(fused_shared_expert=shared)
    group = make_group(config_of(case, n_sms=16))
    check_overlap(compiled(mesh, functools.partial(program, group), case=case), program)


@pytest.mark.parametrize("origin", ["one device", "nvfp4"])
def test_constants_may_be_operands_of_asynchronous_calls(mesh, origin) -> None:
    """XLA of jax 0.12 does not compile an asynchronous call with a constant as operand."""
    if origin == "one device":
        case, mesh = cases.SMALL[1], jax.sharding.Mesh(mesh.devices[:1], (AXIS,))
    else:
        case = cases.QUANTIZED_SMALL[origin]
    config = config_of(case, n_sms=16)
    group = group_of(mesh, config)

    def body(tokens, topk_ids):
        in_flight = jax_ep.dispatch_async(group, tokens, topk_ids)
        overlapped = jnp.tanh(in_flight.then(tokens))
        rows = jax_ep.dispatch_wait(group, in_flight, after=overlapped)
        out = jax_ep.dequantize(rows).astype(config.combine_dtype)
        in_flight = jax_ep.combine_async(group, out, rows)
        more = jnp.sin(in_flight.then(overlapped))
        return jax_ep.combine_wait(group, in_flight, after=more), more

    steps = max(computations(compiled(mesh, body, case=case)), key=len)
    assert [found[0] for found in while_in_flight(steps)] == ["jax_ep_wait_started"] * 2


@pytest.mark.parametrize("is_async", [False, True])
def test_a_loop_that_stacks_results_makes_each_call_once(mesh, make_group, is_async) -> None:
    """Without a barrier, XLA fuses the store into a larger array with a copy of the call."""
    group = make_group(config_of(CASE))

    def loop(tokens, topk_ids):
        def step(x, _):
            rows = suite.dispatch(group, x, topk_ids, is_async=is_async)
            out = suite.combine(group, 2 * rows.tokens, rows, is_async=is_async)
            acts = jax_ep.fused_silu(rows.tokens, rows.row_offsets)
            return out, (out, rows.tokens, rows.handle, acts, acts.sum())

        return jax.lax.scan(step, tokens, length=3)

    program = compiled(mesh, loop)
    targets = re.findall(r'custom_call_target="jax_ep_(\w+)"', program.as_text())
    async_calls = ["async_alloc", "dispatch_start", "async_done", "combine_start"]
    calls = async_calls if is_async else ["dispatch", "combine"]
    assert sorted(targets) == sorted(["check", "fused_silu", *calls])
    assert "copy" not in max(computations(program), key=len)


@pytest.mark.parametrize(
    "saved", [(), (jax_ep.DISPATCH_NAME,), (jax_ep.DISPATCH_NAME, jax_ep.COMBINE_NAME)]
)
def test_gradients_make_each_asynchronous_call_once(mesh, make_group, saved) -> None:
    """In straight-line code and in a loop, also if a policy saves the results."""
    group = make_group(config_of(CASE, n_sms=16))
    policy = jax.checkpoint_policies.save_only_these_names(*saved)
    layer = functools.partial(async_layers.overlapped_layer, group)
    layer = jax.checkpoint(layer, policy=policy) if saved else layer

    def straight(tokens, topk_ids):
        return layer(layer(tokens, topk_ids), topk_ids)

    for body, n_layers in ((straight, 2), (scanned(layer, 2), 1)):
        grad = jax.grad(lambda *x, body=body: jnp.sum(body(*x).astype(jnp.float32)))
        text = compiled(mesh, grad).as_text()
        for target in ("async_alloc", "dispatch_start", "async_done"):
            assert text.count(f'custom_call_target="jax_ep_{target}"') == n_layers
        # The result of the last layer is not needed.
        assert text.count('custom_call_target="jax_ep_combine_start"') == 1


def test_asynchronous_calls_have_no_second_derivative(mesh, make_group) -> None:
    """Like synchronous calls, they raise; the derivative must not silently be zero."""
    group = make_group(config_of(CASE))

    def dispatched(tokens, topk_ids):
        return jnp.sum(suite.dispatch(group, tokens, topk_ids, is_async=True).tokens ** 3)

    def combined(tokens, topk_ids):
        rows = jax_ep.dispatch(group, jax.lax.stop_gradient(tokens), topk_ids)
        return jnp.sum(suite.combine(group, rows.tokens * tokens[0], rows, is_async=True) ** 3)

    for body in (dispatched, combined):
        jax.eval_shape(on_mesh(mesh, jax.grad(body)), *operand_types())
        twice = jax.grad(lambda x, i, f=body: jnp.sum(jax.grad(f)(x, i)))
        with pytest.raises(NotImplementedError, match="jax_ep_finished"):
            jax.eval_shape(on_mesh(mesh, twice), *operand_types())


@pytest.mark.parametrize("name", [*QUANTIZED_FORMATS])
def test_quantization_adds_no_custom_call(name, mesh, make_group) -> None:
    case = cases.QUANTIZED_SMALL[name]
    group = make_group(config_of(case))

    def body(tokens, topk_ids):
        rows = jax_ep.dispatch(group, tokens, topk_ids)
        acts = jax_ep.fused_silu(jax_ep.dequantize(rows), rows.row_offsets, jax_ep.MXFP8())
        return rows.tokens, acts.tokens

    (steps,) = computations(compiled(mesh, body, case=case))
    assert our_steps(steps) == [CHECK, "jax_ep_dispatch", "jax_ep_fused_silu"]


def test_redispatch_is_one_kernel_and_fills_no_rows(mesh, make_group) -> None:
    """No operand stands for the rows, which there are none of."""
    group = make_group(config_of(CASE))

    def body(tokens, topk_ids):
        dispatched = jax_ep.dispatch(group, tokens, topk_ids)
        return jax_ep.redispatch(group, tokens, dispatched)

    program = compiled(mesh, body)
    (steps,) = computations(program)
    assert our_steps(steps) == [CHECK, "jax_ep_dispatch", "jax_ep_combine_grad"]
    assert "broadcast" not in program.as_text()
