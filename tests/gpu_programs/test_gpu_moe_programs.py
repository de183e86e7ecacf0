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
