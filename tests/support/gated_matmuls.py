"""The custom calls of experts' matmuls, and operands for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from call_attributes import attributes_by_target, lowered
from jax_ep.layer.activation.calls import Activation
from jax_ep.layer.matmul import choose

GATED, MATMUL, SILU = "jax_ep_gated_matmul", "jax_ep_grouped_matmul", "jax_ep_fused_silu"
GATED_GRAD, SILU_GRAD = "jax_ep_gated_matmul_grad", "jax_ep_fused_silu_grad"
VARIANTS = {
    "plain": Activation(jax_ep.BF16(), False, None),
    "interleaved, clamped": Activation(jax_ep.BF16(), True, (1.702, 1.0)),
}
WITH_BIAS = pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])


def make_operands(sizes, h, f, spare=5, has_bias=False):
    """Rows, of which the last `spare` are NaN, both weights, perhaps a bias, and row_offsets."""
    offsets = np.cumsum([0, *sizes]).astype(np.uint32)
    keys = jax.random.split(jax.random.key(0), 4)
    rows = jax.random.normal(keys[0], (int(offsets[-1]) + spare, h), jnp.bfloat16)
    rows = rows.at[int(offsets[-1]) :].set(jnp.nan)
    gate_up = jax.random.normal(keys[1], (len(sizes), h, 2 * f), jnp.bfloat16) * h**-0.5
    down = jax.random.normal(keys[2], (len(sizes), f, h), jnp.bfloat16) * f**-0.5
    bias = jax.random.normal(keys[3], (len(sizes), 2 * f), jnp.bfloat16)
    return rows, gate_up, down, *([bias] if has_bias else []), offsets


def large_types(has_bias):
    """The types of such operands, so large that one kernel does the work of two."""
    n_groups, n_rows, h, f = 4, 4096, 4096, 6400
    shapes = (n_rows, h), (n_groups, h, 2 * f), (n_groups, f, h), *([(n_groups, 2 * f)] * has_bias)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return *arrays, jax.ShapeDtypeStruct((n_groups + 1,), jnp.uint32)


def lower_for(monkeypatch, kernels):
    """Programs are lowered for GPUs that run these kernels."""
    monkeypatch.setattr(choose, "kernels", lambda: kernels)
    monkeypatch.setattr("jax_ep.ffi.extension.register_cuda", lambda: None)


def targets(monkeypatch, function, *operands):
    """The calls of a program for Hopper GPUs."""
    lower_for(monkeypatch, choose.Kernels.HOPPER)
    return attributes_by_target(lowered(jax.jit(function), "cuda", *operands))


def count_calls(monkeypatch, function, *operands):
    found = targets(monkeypatch, function, *operands)
    return {name: len(calls) for name, calls in found.items()}
