"""The first matmul of experts and the activation, in one call: the bits of the two calls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
import suite
from harness import on_mesh
from jax_ep.layer import gated_matmul
from jax_ep.layer import matmul as matmul_primitive
from jax_ep.layer.activation import Activation
from test_attributes import CASES, GATE, attributes_by_target, closed_group, lowered

GATED, MATMUL, SILU = "jax_ep_gated_matmul", "jax_ep_grouped_matmul", "jax_ep_fused_silu"
VARIANTS = {
    "plain": Activation(jax_ep.BF16(), False, None),
    "interleaved, clamped": Activation(jax_ep.BF16(), True, (1.702, 1.0)),
}


def make_operands(sizes, h, f, spare=5):
    """Rows, of which the last `spare` are NaN, weights `[L, h, 2 f]` and row_offsets."""
    offsets = np.cumsum([0, *sizes]).astype(np.uint32)
    keys = jax.random.split(jax.random.key(0), 2)
    rows = jax.random.normal(keys[0], (int(offsets[-1]) + spare, h), jnp.bfloat16)
    rows = rows.at[int(offsets[-1]) :].set(jnp.nan)
    weights = jax.random.normal(keys[1], (len(sizes), h, 2 * f), jnp.bfloat16) * h**-0.5
    return rows, weights, offsets


def one_call(activation, *operands):
    return gated_matmul.multiply_and_activate(*operands, activation)


def bits(arrays, n_used):
    """The values of rows in use, or a gradient of rows and of weights."""
    return [np.asarray(x[:n_used] if x.ndim == 2 else x).view(np.uint16) for x in arrays]


def value_and_gradients(function, rows, weights, offsets):
    def run(rows, weights):
        values, pull = jax.vjp(lambda *x: function(*x, offsets), rows, weights)
        return values, *pull(jnp.cos(values.astype(jnp.float32)).astype(values.dtype))

    return bits(jax.jit(run)(rows, weights), int(offsets[-1]))


def assert_same_bits(activation, sizes, h, f):
    rows, weights, offsets = make_operands(sizes, h, f)
    pair = functools.partial(gated_matmul.activate_product, activation)
    one = functools.partial(one_call, activation)
    wanted = value_and_gradients(pair, rows, weights, offsets)
    (alone,) = bits([jax.jit(one)(rows, weights, offsets)], int(offsets[-1]))
    np.testing.assert_array_equal(alone, wanted[0])
    jax.tree.map(
        np.testing.assert_array_equal, value_and_gradients(one, rows, weights, offsets), wanted
    )


@pytest.mark.parametrize("activation", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("sizes", [[3, 0, 140, 1], [0, 0]], ids=["mixed", "empty"])
def test_bits_are_those_of_two_calls(sizes, activation):
    assert_same_bits(activation, sizes, 64, 40)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("f", [3200, 3208])
def test_bits_are_those_of_two_calls_where_one_kernel_does_both(f, activation):
    """Large enough weights and rows, and groups that do not fill CUTLASS's tiles."""
    assert_same_bits(activation, [100, 0, 131, 9, 300, 129, 77, 140], 2048, f)


def test_one_call_may_be_mapped():
    rows, weights, offsets = make_operands([5, 0, 9], 16, 8)
    one = functools.partial(one_call, VARIANTS["plain"])
    got = jax.jit(jax.vmap(one, (0, None, None)))(jnp.stack([rows, -rows]), weights, offsets)
    wanted = [one(x, weights, offsets) for x in (rows, -rows)]
    for mapped, alone in zip(got, wanted, strict=True):
        jax.tree.map(np.testing.assert_array_equal, bits([mapped], 14), bits([alone], 14))


def targets(monkeypatch, function, *operands):
    """How often a program for Hopper GPUs has each call."""
    monkeypatch.setattr(matmul_primitive, "_is_built", lambda: True)
    monkeypatch.setattr(matmul_primitive, "_compute_capability", lambda: 9)
    monkeypatch.setattr("jax_ep.xla_ffi.extension.register_cuda", lambda: None)
    return attributes_by_target(lowered(jax.jit(function), "cuda", *operands))


def test_a_gradient_takes_two_calls(monkeypatch):
    rows, weights, offsets = make_operands([5, 9], 16, 8)
    one = functools.partial(one_call, VARIANTS["plain"])
    assert targets(monkeypatch, one, rows, weights, offsets) == {GATED: [GATE]}

    def gradients(rows, weights, offsets):
        values, pull = jax.vjp(lambda *x: one(*x, offsets), rows, weights)
        return pull(values)

    found = targets(monkeypatch, gradients, rows, weights, offsets)
    assert {name: len(calls) for name, calls in found.items()} == {MATMUL: 3, SILU: 1}


def test_sizes_without_a_kernel_take_two_calls(monkeypatch):
    operands = make_operands([5, 9], 16, 12)  # F is not a multiple of 8
    found = targets(monkeypatch, functools.partial(one_call, VARIANTS["plain"]), *operands)
    assert set(found) == {MATMUL, SILU}


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({}, [GATED, MATMUL]),
        ({"interleaved": True, "clamp": (1.0, 2.0)}, [GATED, MATMUL]),
        ({"down_bias": (128,)}, [GATED, MATMUL]),
        ({"gate_up_bias": (128,)}, [SILU, MATMUL, MATMUL]),
        ({"transposed": True}, [SILU, MATMUL, MATMUL]),
    ],
    ids=str,
)
def test_experts_without_bias_or_transposed_weights_are_two_calls(options, calls, monkeypatch):
    case = CASES["plain"]
    group, n_local = closed_group(case, "cuda"), case.n_experts // case.n_ranks

    def ones(*shape):
        return jnp.ones((n_local, *shape), jnp.bfloat16)

    def layer(tokens, topk_ids):
        rows = jax_ep.dispatch(group, tokens, topk_ids)
        shapes = ((128, 128), (128, 64)) if "transposed" in options else ((128, 128), (64, 128))
        given = {k: ones(*v) if k.endswith("bias") else v for k, v in options.items()}
        return jax_ep.expert_mlp(rows, *(ones(*shape) for shape in shapes), **given)

    operands = [np.stack(each) for each in suite.make_inputs(case).arrays()[:2]]
    found = targets(monkeypatch, on_mesh(group.mesh, layer), *operands)
    experts = [name for name, each in found.items() for _ in each if name in (GATED, MATMUL, SILU)]
    assert sorted(experts) == sorted(calls)
