"""moe's gradient as XLA compiles it for GPUs; see test_gpu_programs.py."""

import functools

import jax
import pytest

import async_layers
import jax_ep
import test_transforms
from harness import config_of
from test_gpu_programs import CASE, CHECK, compiled, computations, our_steps, while_in_flight
from test_gpu_programs import make_group as make_group
from test_gpu_programs import mesh as mesh

MATMUL, ACTIVATION = "jax_ep_grouped_matmul", "jax_ep_fused_silu"
# How a layer is checkpointed -> what the backward computes again.
REPEATED = {
    "all kept": (lambda layer: layer, []),
    "two kept": (
        test_transforms._saving(jax_ep.DISPATCH_NAME, jax_ep.EXPERT_HIDDEN_NAME),
        [ACTIVATION, MATMUL],
    ),
    "none kept": (jax.checkpoint, ["jax_ep_dispatch", MATMUL, ACTIVATION, MATMUL]),
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
    forward = ["jax_ep_dispatch", MATMUL, ACTIVATION, MATMUL, "jax_ep_combine"]
    found = computations(compiled(mesh, gradients, case=case))
    steps = next(each for each in found if "call-start" in each)
    (beside,) = while_in_flight(steps)
    assert our_steps(beside) == ["jax_ep_wait_started", MATMUL, MATMUL], steps
    start, done = steps.index("call-start"), steps.index("call-done")
    before, after = our_steps(steps[:start]), our_steps(steps[done:])
    assert after == ["jax_ep_async_done"], steps
    backward = ["jax_ep_combine_grad", MATMUL, MATMUL, "jax_ep_async_alloc"]
    if n_layers == 1:
        backward = [*forward, *backward]
    expected = [CHECK, *repeated, *backward]
    assert sorted({*before, MATMUL}) == sorted({*expected, MATMUL}), steps
    # XLA 0.12 fuses matmuls with the slices of a loop's arrays that they read.
    n_hidden = expected.count(MATMUL) - before.count(MATMUL)
    assert n_hidden == 0 or (n_hidden > 0 and n_layers > 1), steps
    assert len(before) + n_hidden == len(expected), steps
