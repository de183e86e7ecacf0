"""Gradients of experts as XLA compiles them for GPUs; see test_gpu_programs.py."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from gpu_compiler import CASE, CHECK, FREE, compiled, computations, our_steps
from gpu_compiler import make_group as make_group
from gpu_compiler import mesh as mesh
from harness import config_of

MATMUL, ACTIVATION = "jax_ep_grouped_matmul", "jax_ep_fused_silu"
SCALED = "jax_ep_gated_scaled_matmul"  # the same in FP8, for no gradient


@pytest.mark.parametrize("layout", ["transposed", "row_major"])
@pytest.mark.parametrize("differentiates", [False, True])
def test_experts_in_fp8_are_two_calls_where_nothing_is_differentiated(
    mesh, make_group, differentiates, layout
) -> None:
    """Nothing else runs, such as what the tokens' gradient needs; but scales are transposed."""
    case = CASE.replace(hidden_size=256, token_format="blockwise_fp8", scales_layout=layout)
    group, n_local = make_group(config_of(case)), case.n_experts // case.n_ranks
    rng = np.random.default_rng(0)  # XLA would make arrays of ones in fusions

    def codes(n, k):
        numbers = rng.standard_normal((n_local, n, k))
        scales = rng.random((n_local, n // 128, k // 128), np.float32)
        return numbers.astype(jnp.float8_e4m3fn), scales, numbers.astype(jnp.bfloat16)

    matrices = codes(256, 256), codes(256, 128)

    def layer(tokens, topk_ids):
        rows = jax_ep.dispatch(group, tokens, topk_ids)
        weights = [jax_ep.QuantizedWeights(*each, transposed=True) for each in matrices]
        return jax_ep.combine(group, jax_ep.expert_mlp(rows, *weights), rows)

    def gradient(tokens, topk_ids):
        results, pull = jax.vjp(lambda x: layer(x, topk_ids), tokens)
        return pull(results)

    body = gradient if differentiates else layer
    (steps,) = computations(compiled(mesh, body, case=case))
    calls = our_steps(steps)
    if differentiates:
        assert SCALED not in calls and calls.count(MATMUL) == 4 and calls.count(ACTIVATION) == 1
        return
    assert calls == [CHECK, "jax_ep_dispatch", SCALED, MATMUL, "jax_ep_combine"]
    own_rank, transposition = 1, int(layout == "row_major")
    assert steps.count("fusion") == own_rank + transposition, steps


@pytest.mark.parametrize("n_microbatches", [1, 3])
def test_gradients_of_weights_are_added_in_place(mesh, n_microbatches) -> None:
    """In a loop over microbatches, nothing but the call makes an array of their type."""

    def add(sums, batch):
        return jax_ep.grouped_matmul_gradient(*batch, sums), None

    shapes = {(256, 64): jnp.bfloat16, (256, 128): jnp.bfloat16, (5,): jnp.uint32}
    sharding = jax.NamedSharding(mesh, jax.P())
    typed = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    batches = [typed((n_microbatches, *shape), dtype) for shape, dtype in shapes.items()]
    loop = jax.jit(lambda sums, *x: jax.lax.scan(add, sums, x)[0], donate_argnums=0)
    lowered = loop.lower(typed((4, 64, 128), jnp.float32), *batches)
    program = lowered.compile(compiler_options={"xla_gpu_autotune_level": "0"})
    text = program.as_text()
    assert text.count(f'custom_call_target="{MATMUL}"') == 1
    makes = re.findall(r"= \(?f32\[4,64,128\]\S* .*?([a-z\-]+)\(", text)
    assert {"custom-call", "parameter"} <= set(makes) <= {*FREE, "custom-call", "fusion"}, makes
    fusions = [line for line in text.splitlines() if " fusion(" in line and "f32[4,64,128]" in line]
    assert all("dynamic-slice-fusion" in line for line in fusions), fusions  # around the call


POLICIES = {
    "all": None,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "copies": jax.checkpoint_policies.save_only_these_names(jax_ep.EXPERT_COPIES_NAME),
    "not copies": jax.checkpoint_policies.save_anything_except_these_names(
        jax_ep.EXPERT_COPIES_NAME
    ),
}


@pytest.mark.parametrize("in_loop", [False, True])
@pytest.mark.parametrize("saved", POLICIES)
def test_lent_weights_arrive_where_they_are_used(mesh, make_group, saved, in_loop) -> None:
    """What is sent stays where it is until it is received, once."""
    case = CASE.replace(hidden_size=128, expert_copies=2, token_format="bf16")
    group, n_local = make_group(config_of(case)), case.n_experts // case.n_ranks
    weights = [jnp.ones((n_local, *shape), jnp.bfloat16) for shape in ((128, 256), (128, 128))]

    def layer(tokens, topk_ids, weights):
        rows = jax_ep.dispatch(group, tokens, topk_ids)
        return jax_ep.combine(group, jax_ep.expert_mlp(rows, *weights), rows)

    def gradient(tokens, topk_ids):
        def loss(tokens, weights):
            call = functools.partial(layer, topk_ids=topk_ids, weights=weights)
            if POLICIES[saved]:
                call = jax.checkpoint(call, policy=POLICIES[saved])
            if not in_loop:
                return call(tokens).astype(jnp.float32).sum()
            out, _ = jax.lax.scan(lambda x, _: (call(x), None), tokens, length=3)
            return out.astype(jnp.float32).sum()

        return jax.grad(loss, argnums=(0, 1))(tokens, weights)

    text = compiled(mesh, gradient, case=case).as_text()
    received = re.findall(r"custom-call\(([^)]*)\), custom_call_target=\"jax_ep_receive", text)
    n_passes = 2 if in_loop and saved == "nothing" else 1  # outside of a loop, the first is unused
    assert len(received) == text.count('"jax_ep_send_copies"') == 2 * n_passes
    for operands in received:
        name = operands.split(", ")[3].split()[-1]
        (definition,) = re.findall(rf"^ *{re.escape(name)} = \S+ (.*)", text, re.MULTILINE)
        assert definition.startswith("get-tuple-element"), definition
    sends, waits = "jax_ep_send_copies", "jax_ep_receive_copies"
    for steps in computations(compiled(mesh, gradient, case=case)):
        if waits in steps:
            first = steps.index(waits)
            assert steps[:first].count(sends) == steps.count(sends), steps
            assert "jax_ep_dispatch" in steps[:first], steps
