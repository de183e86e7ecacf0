"""Gradients of experts as XLA compiles them for GPUs; see test_gpu_programs.py."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import pytest

import async_layers
import jax_ep
import test_transforms
from harness import config_of
from test_gpu_programs import CASE, CHECK, FREE, compiled, computations, our_steps, while_in_flight
from test_gpu_programs import make_group as make_group
from test_gpu_programs import mesh as mesh

MATMUL, ACTIVATION = "jax_ep_grouped_matmul", "jax_ep_fused_silu"
GATED = "jax_ep_gated_matmul"  # the first matmul and the activation
GATED_GRAD = "jax_ep_gated_matmul_grad"  # of the second matmul's rows, and of the activation
# How a layer is checkpointed -> what the backward computes again.
REPEATED = {
    "all kept": (lambda layer: layer, []),
    "two kept": (
        test_transforms._saving(jax_ep.DISPATCH_NAME, jax_ep.EXPERT_HIDDEN_NAME),
        [ACTIVATION, MATMUL],
    ),
    "none kept": (jax.checkpoint, ["jax_ep_dispatch", GATED, MATMUL]),
}


@pytest.mark.parametrize("n_layers", [1, 3])
@pytest.mark.parametrize("kept", REPEATED)
def test_the_backward_of_moe_computes_gradients_of_weights_beside_the_exchange(
    mesh, make_group, n_layers, kept
) -> None:
    """The two matmuls that nothing waits for, and only these; straight-line, and in a loop."""
    case, (wrap, repeated) = CASE.replace(hidden_size=128), REPEATED[kept]
    group = make_group(config_of(case, n_sms=16))
    gradients = functools.partial(
        async_layers.gradients_of_moe, group, n_layers=n_layers, wrap=wrap
    )
    forward = ["jax_ep_dispatch", GATED, MATMUL, "jax_ep_combine"]
    program = compiled(mesh, gradients, case=case)
    text, found = program.as_text(), computations(program)
    steps = next(each for each in found if "call-start" in each)
    (beside,) = while_in_flight(steps)
    assert our_steps(beside) == ["jax_ep_wait_started", MATMUL, MATMUL], steps
    start, done = steps.index("call-start"), steps.index("call-done")
    before, after = our_steps(steps[:start]), our_steps(steps[done:])
    assert after == ["jax_ep_async_done"], steps
    backward = ["jax_ep_combine_grad", GATED_GRAD, MATMUL, "jax_ep_async_alloc"]
    if n_layers == 1:
        backward = [*forward, *backward]
    expected = collections.Counter([CHECK, *repeated, *backward])
    expected.subtract(before)
    # From 0.11 on, XLA fuses calls in a loop with the slices of stacked arrays that they read.
    fused = set(expected.elements())
    may_be_fused = {MATMUL, GATED_GRAD, "jax_ep_combine_grad"}
    assert not fused or (n_layers > 1 and fused <= may_be_fused), steps
    assert min(expected.values()) >= 0, steps
    wanted = {"jax_ep_combine_grad": 1, GATED_GRAD: 1, MATMUL: 4 + repeated.count(MATMUL)}
    wanted |= {GATED: 1 + repeated.count(GATED), ACTIVATION: repeated.count(ACTIVATION)}
    for target, n in wanted.items():
        assert text.count(f'custom_call_target="{target}"') == n, target


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
