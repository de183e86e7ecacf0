"""The matmuls of experts, with a bias and the activation or its gradient in them.

The bits are those of separate calls.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jax_ep
import suite
from call_attributes import CASES, GATE, closed_group
from gated_matmuls import (
    GATED,
    GATED_GRAD,
    MATMUL,
    SILU,
    SILU_GRAD,
    VARIANTS,
    WITH_BIAS,
    count_calls,
    large_types,
    make_operands,
    targets,
)
from harness import on_mesh
from jax_ep.layer.matmul import choose, gated
from jax_ep.layer.matmul.rules import add_bias


def experts(activation, rows, gate_up, down, *rest):
    """`gated_mlp` of the operands above."""
    *biases, offsets = rest
    return gated.gated_mlp(activation, rows, gate_up, down, offsets, *biases)


def by_separate_calls(activation, rows, gate_up, down, *rest):
    """The calls that `expert_mlp` is short for."""
    *biases, offsets = rest
    options = {"interleaved": activation.interleaved, "clamp": activation.clamp}
    hidden = jax_ep.grouped_matmul(rows, gate_up, offsets)
    for bias in biases:
        hidden = add_bias(hidden, bias, offsets)
    hidden = checkpoint_name(hidden, jax_ep.EXPERT_HIDDEN_NAME)
    values = jax_ep.fused_silu(hidden, offsets, **options)
    return jax_ep.grouped_matmul(values, down, offsets)


def bits(arrays, n_used):
    """Results, or gradients, of rows in use, and the gradients of weights and biases."""
    n_rows = len(arrays[0])
    return [np.asarray(x[:n_used] if len(x) == n_rows else x).view(np.uint16) for x in arrays]


def value_and_gradients(function, *operands):
    *arrays, offsets = operands

    def run(*arrays):
        results, pull = jax.vjp(lambda *x: function(*x, offsets), *arrays)
        return results, *pull(jnp.cos(results.astype(jnp.float32)).astype(results.dtype))

    return bits(jax.jit(run)(*arrays), int(offsets[-1]))


def assert_same_bits(activation, sizes, h, f, has_bias):
    operands = make_operands(sizes, h, f, has_bias=has_bias)
    separate = functools.partial(by_separate_calls, activation)
    mlp = functools.partial(experts, activation)
    wanted = value_and_gradients(separate, *operands)
    assert len(wanted) == len(operands)
    (alone,) = bits([jax.jit(mlp)(*operands)], int(operands[-1][-1]))
    np.testing.assert_array_equal(alone, wanted[0])
    jax.tree.map(np.testing.assert_array_equal, value_and_gradients(mlp, *operands), wanted)


@pytest.mark.parametrize("activation", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("sizes", [[3, 0, 140, 1], [0, 0]], ids=["mixed", "empty"])
@WITH_BIAS
def test_bits_are_those_of_separate_calls(has_bias, sizes, activation):
    assert_same_bits(activation, sizes, 64, 40, has_bias)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("f", [6400, 6408])
@WITH_BIAS
def test_bits_are_those_of_separate_calls_where_one_kernel_does_two(has_bias, f, activation):
    """Large enough weights and rows, and groups that do not fill CUTLASS's tiles."""
    assert_same_bits(activation, [1000, 0, 2100, 1100], 4096, f, has_bias)


@pytest.mark.gpu
@pytest.mark.parametrize("n_groups", [5, 512, 513])
def test_biases_of_few_and_of_many_groups(n_groups):
    """With small weights, and with more groups than one kernel takes."""
    sizes = np.random.default_rng(0).integers(0, 20, n_groups)
    assert_same_bits(VARIANTS["interleaved, clamped"], sizes, 72, 40, has_bias=True)


def call_as_before(target, operands, results, n_groups, **attributes):
    """A call as programs of earlier versions make it: all results, then memory to work in."""
    workspace = jax.ShapeDtypeStruct((256 * 4 * 128 + 256 * n_groups + 4096,), jnp.uint8)
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in results]
    gate = dict(interleaved=np.bool_(False), clamped=np.bool_(False))
    numbers = dict(alpha=np.float32(0), limit=np.float32(0))
    call = jax.ffi.ffi_call(target, [*types, workspace])
    return jax.jit(functools.partial(call, **gate, **numbers, **attributes))(*operands)[0]


@pytest.fixture
def hopper():
    if choose.kernels() != choose.Kernels.HOPPER:
        pytest.skip("needs a Hopper GPU")


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_programs_of_earlier_versions_have_room_for_what_is_not_written():
    """For the hidden rows, and for the gradient of their activation."""
    rows, gate_up, down, offsets = make_operands([5, 0, 140], 64, 40)
    c, used = len(rows), int(offsets[-1])
    hidden = jax_ep.grouped_matmul(rows, gate_up, offsets)
    wanted, pull = jax.vjp(lambda x: jax_ep.fused_silu(x, offsets), hidden)
    results = (c, 40), (c, 80)
    operands = rows, gate_up, offsets
    got = call_as_before(GATED, operands, results, 3, keeps_hidden=np.bool_(False))
    np.testing.assert_array_equal(*bits([got[:used], wanted[:used]], used))
    of_values = jax_ep.grouped_matmul(rows, down, offsets, transposed=True)
    got = call_as_before(GATED_GRAD, (rows, down, hidden, offsets), results[::-1], 3)
    np.testing.assert_array_equal(*bits([got[:used], pull(of_values)[0][:used]], used))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_more_groups_than_a_kernel_takes_are_an_error():
    """In programs of earlier versions, whose handlers chose another kernel."""
    rows, gate_up, _, offsets = make_operands([1] * 513, 64, 40)
    results = (len(rows), 40), (len(rows), 80)
    with pytest.raises(jax.errors.JaxRuntimeError, match="513 groups.*Compile the program again"):
        operands = rows, gate_up, offsets
        keeps_hidden = np.bool_(False)
        got = call_as_before(GATED, operands, results, 513, keeps_hidden=keeps_hidden)
        jax.block_until_ready(got)


# By what the backward has of the forward. (If it has nothing, JAX adds up second derivatives in
# another order.)
CHECKPOINTS = {
    "all": lambda function: function,
    "hidden rows": functools.partial(
        jax.checkpoint,
        policy=jax.checkpoint_policies.save_only_these_names(jax_ep.EXPERT_HIDDEN_NAME),
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("kept", CHECKPOINTS)
@pytest.mark.parametrize("activation", VARIANTS.values(), ids=VARIANTS)
@WITH_BIAS
def test_gradients_have_gradients(has_bias, activation, kept):
    rows, *others = make_operands([5, 0, 9], 16, 8, has_bias=has_bias)

    def squares(function):
        def loss(rows):
            results = function(rows, *others)
            return jnp.sum(results[:14].astype(jnp.float32) ** 2)

        def of_gradient(rows):
            return jnp.sum(jax.grad(loss)(rows)[:14].astype(jnp.float32) ** 2)

        return bits([jax.jit(jax.grad(of_gradient))(rows)], 14)

    wanted = squares(functools.partial(by_separate_calls, activation))
    assert np.any(wanted[0])
    mlp = functools.partial(experts, activation)
    np.testing.assert_array_equal(squares(CHECKPOINTS[kept](mlp)), wanted)


@pytest.mark.thorough
def test_gradients_of_biases_have_gradients():
    """Of the bias's, by rows, and of the rows', by the bias."""
    rows, gate_up, down, bias, offsets = make_operands([5, 0, 9], 16, 8, has_bias=True)

    def mixed(function):
        def loss(rows, bias):
            results = function(VARIANTS["plain"], rows, gate_up, down, bias, offsets)
            return jnp.sum(results[:14].astype(jnp.float32) ** 2)

        def of_gradient(rows, bias, of):
            return jnp.sum(jax.grad(loss, of)(rows, bias)[:14].astype(jnp.float32) ** 2)

        by_rows = jax.jit(jax.grad(of_gradient, 0), static_argnums=2)(rows, bias, 1)
        by_bias = jax.jit(jax.grad(of_gradient, 1), static_argnums=2)(rows, bias, 0)
        return bits([by_rows, by_bias], 14)

    wanted = mixed(by_separate_calls)
    assert all(map(np.any, wanted))
    jax.tree.map(np.testing.assert_array_equal, mixed(experts), wanted)


@WITH_BIAS
def test_the_experts_may_be_mapped(has_bias):
    rows, *others = make_operands([5, 0, 9], 16, 8, has_bias=has_bias)
    mlp = functools.partial(experts, VARIANTS["plain"])
    mapped = jax.jit(jax.vmap(mlp, (0, *[None] * len(others))))
    got = mapped(jnp.stack([rows, -rows]), *others)
    wanted = [mlp(x, *others) for x in (rows, -rows)]
    for each, alone in zip(got, wanted, strict=True):
        jax.tree.map(np.testing.assert_array_equal, bits([each], 14), bits([alone], 14))


def gradients_of(function):
    def gradients(*operands):
        *arrays, offsets = operands
        results, pull = jax.vjp(lambda *x: function(*x, offsets), *arrays)
        return pull(results)

    return gradients


@WITH_BIAS
def test_a_gradient_differentiates_the_activation_in_a_matmul(has_bias, monkeypatch):
    operands = large_types(has_bias)
    mlp = functools.partial(experts, VARIANTS["plain"])
    assert targets(monkeypatch, mlp, *operands)[GATED] == [GATE | {"keeps_hidden": "bool"}]
    assert count_calls(monkeypatch, mlp, *operands) == {GATED: 1, MATMUL: 1}
    wanted = {GATED: 1, MATMUL: 4 + has_bias, GATED_GRAD: 1}
    assert count_calls(monkeypatch, gradients_of(mlp), *operands) == wanted
    separate = functools.partial(by_separate_calls, VARIANTS["plain"])
    wanted = {MATMUL: 6 + has_bias, SILU: 1, SILU_GRAD: 1}
    assert count_calls(monkeypatch, gradients_of(separate), *operands) == wanted


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("policy", "again"),
    [
        (None, {GATED: 1}),
        (jax.checkpoint_policies.save_only_these_names(jax_ep.EXPERT_HIDDEN_NAME), {SILU: 1}),
        (jax.checkpoint_policies.everything_saveable, {}),
    ],
    ids=["nothing kept", "hidden rows kept", "all kept"],
)
@WITH_BIAS
def test_kept_hidden_rows_are_activated_again_and_not_multiplied(
    has_bias, policy, again, monkeypatch
):
    mlp = functools.partial(experts, VARIANTS["plain"])
    checkpointed = jax.checkpoint(mlp, policy=policy)
    calls, once = (
        count_calls(monkeypatch, gradients_of(function), *large_types(has_bias))
        for function in (checkpointed, mlp)
    )
    assert calls.pop(MATMUL) == once.pop(MATMUL)
    assert collections.Counter(calls) == collections.Counter(once) + collections.Counter(again)
    operands = make_operands([5, 9], 16, 8, has_bias=has_bias)
    wanted = value_and_gradients(mlp, *operands)
    got = value_and_gradients(checkpointed, *operands)
    if has_bias:  # XLA for CPUs may keep the sum with a bias in float32, unless a policy keeps it
        jax.tree.map(assert_close, got, wanted)
    else:
        jax.tree.map(np.testing.assert_array_equal, got, wanted)


def assert_close(got, wanted):
    """Of bits of bfloat16: up to rounding."""
    got, wanted = (x.view(jnp.bfloat16).astype(np.float32) for x in (got, wanted))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=0.02 * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({}, [GATED, MATMUL]),
        ({"interleaved": True, "clamp": (1.0, 2.0)}, [GATED, MATMUL]),
        ({"down_bias": (1024,)}, [GATED, MATMUL]),
        ({"gate_up_bias": (16384,)}, [GATED, MATMUL]),
        ({"transposed": True}, [SILU, MATMUL, MATMUL]),
    ],
    ids=str,
)
def test_experts_without_transposed_weights_are_two_calls(options, calls, monkeypatch):
    case = CASES["plain"].replace(hidden_size=1024)
    group, n_local = closed_group(case, "cuda"), case.n_experts // case.n_ranks
    assert n_local * 1024 * 16384 > 50_000_000  # enough numbers for one kernel

    def ones(*shape):
        return jnp.ones((n_local, *shape), jnp.bfloat16)

    def layer(tokens, topk_ids):
        rows = jax_ep.dispatch(group, tokens, topk_ids)
        shapes = (1024, 16384), (8192, 1024)
        if "transposed" in options:
            shapes = [shape[::-1] for shape in shapes]
        given = {k: ones(*v) if k.endswith("bias") else v for k, v in options.items()}
        return jax_ep.expert_mlp(rows, *(ones(*shape) for shape in shapes), **given)

    operands = [np.stack(each) for each in suite.make_inputs(case).arrays()[:2]]
    found = targets(monkeypatch, on_mesh(group.mesh, layer), *operands)
    names = [name for name, each in found.items() for _ in each if name in (GATED, MATMUL, SILU)]
    assert sorted(names) == sorted(calls)
