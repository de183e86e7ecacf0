"""The matmuls of experts in FP8, of which the first is one call with the activation.

The bits are those of separate calls.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jax_ep
import quick
import suite
from call_attributes import CASES, GATE, closed_group
from gated_matmuls import MATMUL, SILU, SILU_GRAD, VARIANTS, WITH_BIAS, count_calls, targets
from harness import AXIS, make_mesh, on_mesh
from jax_ep.exchange import checks
from jax_ep.layer.expert_weights import ExpertWeights
from jax_ep.layer.matmul.api import multiply_scaled
from jax_ep.layer.matmul.gated_scaled import scaled_mlp
from jax_ep.layer.matmul.rules import add_bias

SCALED = "jax_ep_gated_scaled_matmul"
OF_VARIANTS = pytest.mark.parametrize("activation", VARIANTS.values(), ids=VARIANTS)
MIXED = [3, 0, 140, 1]
HIDDEN_ROWS = jax.checkpoint_policies.save_only_these_names(jax_ep.EXPERT_HIDDEN_NAME)
CHECKPOINTS = {
    "no checkpoint": lambda function: function,
    "nothing kept": jax.checkpoint,
    "hidden rows kept": functools.partial(jax.checkpoint, policy=HIDDEN_ROWS),
    "all kept": functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable
    ),
}


def make_operands(sizes, h=256, f=128, spare=5, has_bias=False):
    """Codes of rows, of which the last `spare` are NaN, the tokens that they encode, both matrices,
    perhaps a bias, and row_offsets."""
    offsets = np.cumsum([0, *sizes]).astype(np.uint32)
    keys = jax.random.split(jax.random.key(0), 4)
    n_used = int(offsets[-1])
    tokens = jax.random.normal(keys[0], (n_used + spare, h), jnp.bfloat16)
    codes, scales = jax_ep.BlockwiseFP8().quantize(tokens)
    codes = codes.at[n_used:].set(jnp.nan)
    scales = scales.at[n_used:].set(jnp.nan)
    rows = jax_ep.QuantizedRows(codes, scales.T, None)
    gate_up = jax.random.normal(keys[1], (len(sizes), h, 2 * f), jnp.bfloat16) * h**-0.5
    down = jax.random.normal(keys[2], (len(sizes), h, f), jnp.float32) * f**-0.5  # transposed
    bias = jax.random.normal(keys[3], (len(sizes), 2 * f), jnp.bfloat16)
    return rows, tokens, gate_up, down, *([bias] if has_bias else []), offsets


def shapes_of(*args, **options):
    """The operands' types."""
    return jax.eval_shape(lambda: make_operands(*args, **options))


def quantized(gate_up, down):
    return jax_ep.quantize_weights(gate_up), jax_ep.quantize_weights(down, transposed=True)


def experts(activation, rows, tokens, gate_up, down, *rest):
    """`scaled_mlp` of the operands above."""
    *biases, offsets = rest
    bias = biases[0] if biases else None
    weights = ExpertWeights(*quantized(gate_up, down), bias, None)
    return scaled_mlp(activation, rows, tokens, weights, offsets)


def by_separate_calls(activation, rows, _, gate_up, down, *rest):
    """The calls that it is short for."""
    *biases, offsets = rest
    gate_up, down = quantized(gate_up, down)
    hidden = jax_ep.grouped_matmul(rows, gate_up, offsets)
    for bias in biases:
        hidden = add_bias(hidden, bias, offsets)
    options = {"interleaved": activation.interleaved, "clamp": activation.clamp}
    codes = jax_ep.fused_silu(hidden, offsets, jax_ep.BlockwiseFP8(), **options)
    return jax_ep.grouped_matmul(codes, down, offsets)


def by_differentiable_calls(activation, rows, tokens, gate_up, down, *rest):
    """The same, with gradients that pass straight through the rounding to codes."""
    *biases, offsets = rest
    gate_up, down = quantized(gate_up, down)
    hidden = multiply_scaled(rows, gate_up, offsets, tokens)
    for bias in biases:
        hidden = add_bias(*checks.vary_alike((), hidden, bias, offsets))
    hidden = checkpoint_name(hidden, jax_ep.EXPERT_HIDDEN_NAME)
    options = {"interleaved": activation.interleaved, "clamp": activation.clamp}
    values = jax_ep.fused_silu(hidden, offsets, **options)
    fixed = lax.stop_gradient(hidden)
    codes = jax_ep.fused_silu(fixed, offsets, jax_ep.BlockwiseFP8(), **options)
    return multiply_scaled(codes, down, offsets, values)


def bits(x, n_used=None):
    x = np.asarray(x[:n_used])
    return x.view(f"uint{8 * x.dtype.itemsize}")


def value_and_gradients(function, rows, *operands):
    *arrays, offsets = operands

    def run(*arrays):
        results, pull = jax.vjp(lambda *x: function(rows, *x, offsets), *arrays)
        return results, *pull(jnp.cos(results.astype(jnp.float32)).astype(results.dtype))

    results, of_tokens, *others = jax.jit(run)(*arrays)
    n_used = int(offsets[-1])
    return [bits(results, n_used), bits(of_tokens, n_used), *map(bits, others)]


def assert_same_bits(activation, operands, wrap=lambda function: function):
    """Of results, where nothing is differentiated, and of results and gradients."""
    n_used = int(operands[-1][-1])
    mlp = wrap(functools.partial(experts, activation))
    alone, wanted = (
        bits(jax.jit(function)(*operands), n_used)
        for function in (mlp, functools.partial(by_separate_calls, activation))
    )
    assert np.any(wanted) == bool(n_used)
    np.testing.assert_array_equal(alone, wanted)
    # Wrapped, too: XLA for CPUs may keep in float32 what a checkpoint's policy rounds.
    separate = wrap(functools.partial(by_differentiable_calls, activation))
    got, wanted = (value_and_gradients(function, *operands) for function in (mlp, separate))
    assert len(wanted) == len(operands) - 1
    assert all(np.any(x) == bool(n_used) for x in wanted)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.thorough
@OF_VARIANTS
@pytest.mark.parametrize("sizes", [MIXED, [0, 0]], ids=["mixed", "empty"])
@WITH_BIAS
def test_bits_are_those_of_separate_calls(has_bias, sizes, activation):
    assert_same_bits(activation, make_operands(sizes, has_bias=has_bias))


@pytest.mark.parametrize(("sizes", "spare"), [([0, 0], 0), ([], 3)], ids=["rows", "experts"])
def test_nothing_to_multiply(sizes, spare):
    operands = make_operands(sizes, spare=spare)
    results = jax.jit(functools.partial(experts, VARIANTS["plain"]))(*operands)
    assert results.shape == (spare, 256) and results.dtype == jnp.bfloat16


@pytest.mark.gpu
@OF_VARIANTS
@pytest.mark.parametrize("f", [128, 1536])
@WITH_BIAS
def test_bits_are_those_of_separate_calls_with_many_rows(has_bias, f, activation):
    """And groups that do not fill tiles."""
    operands = make_operands([1000, 0, 2100, 1, 1100], 4096, f, has_bias=has_bias)
    assert_same_bits(activation, operands)


@pytest.mark.gpu
@pytest.mark.parametrize("n_groups", [1, 512, 513])
@WITH_BIAS
def test_bits_with_few_and_with_many_groups(has_bias, n_groups):
    """Up to more than one kernel takes."""
    sizes = np.random.default_rng(0).integers(0, 20, n_groups)
    operands = make_operands(sizes, spare=64 * n_groups, has_bias=has_bias)
    assert_same_bits(VARIANTS["interleaved, clamped"], operands)


@pytest.mark.thorough
@pytest.mark.parametrize("name", quick.params(CHECKPOINTS, {"nothing kept", "hidden rows kept"}))
def test_checkpoints_change_no_bits(name):
    operands = make_operands(MIXED, has_bias=True)
    assert_same_bits(VARIANTS["interleaved, clamped"], operands, CHECKPOINTS[name])


@pytest.mark.thorough
@WITH_BIAS
def test_the_experts_may_be_mapped(has_bias):
    rows, *others = make_operands([5, 0, 9], has_bias=has_bias)
    mlp = functools.partial(experts, VARIANTS["plain"])
    both = rows, rows._replace(scales=rows.scales / 2)
    axes = jax.tree.map(lambda _: 0, rows), *[None] * len(others)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *both)
    got = jax.jit(jax.vmap(mlp, axes))(stacked, *others)
    wanted = [jax.jit(mlp)(x, *others) for x in both]
    assert np.any(bits(wanted[0], 14) != bits(wanted[1], 14))
    for each, alone in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(bits(each, 14), bits(alone, 14))


@pytest.mark.thorough
@pytest.mark.parametrize("jits", quick.params([True, False], {True}), ids=["jit", "eager"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_ranks_may_share_weights_and_biases(check_vma, jits):
    """Inside `shard_map`, where only the rows vary."""
    rows, tokens, gate_up, down, bias, offsets = make_operands([5, 0, 9], has_bias=True)
    per_rank = jax.tree.map(lambda x: jnp.stack([x, -x]), (rows.tokens, tokens))

    def run(function):
        def body(codes, tokens, *weights):
            def of(tokens, *weights):
                mine = rows._replace(tokens=codes[0])
                return function(VARIANTS["plain"], mine, tokens[0], *weights, offsets)

            results, pull = jax.vjp(of, tokens, *weights)
            alone = function(VARIANTS["plain"], rows, tokens[0], *weights, offsets)
            of_tokens, *others = pull(jnp.sin(results) + 0 * alone)
            return results[None, :14], of_tokens[:, :14], *(x[None] for x in others)

        mesh, split = make_mesh(2), jax.P(AXIS)
        specs = split, split, jax.P(), jax.P(), jax.P()
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=specs, out_specs=split, check_vma=check_vma
        )
        return (jax.jit(mapped) if jits else mapped)(*per_rank, gate_up, down, bias)

    got, wanted = run(experts), run(by_differentiable_calls)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(bits(a), bits(b)), got, wanted)
    assert np.any(bits(wanted[0][0]) != bits(wanted[0][1]))


def test_there_is_no_second_derivative():
    rows, tokens, *others = make_operands([5, 0, 9])

    def loss(tokens):
        results = experts(VARIANTS["plain"], rows, tokens, *others)
        return jnp.sum(results[:14].astype(jnp.float32) ** 2)

    def of_gradient(tokens):
        return jnp.sum(jax.grad(loss)(tokens)[:14].astype(jnp.float32) ** 2)

    with pytest.raises(NotImplementedError, match="a matmul of codes has no second derivative"):
        jax.grad(of_gradient)(tokens)


def gradients_of(function, of=None):
    """Of all floats, or those at the indices `of`."""

    def gradients(rows, *operands):
        *arrays, offsets = operands
        indices = range(len(arrays)) if of is None else of

        def product(*some):
            given = dict(zip(indices, some, strict=True))
            return function(rows, *(given.get(i, x) for i, x in enumerate(arrays)), offsets)

        results, pull = jax.vjp(product, *(arrays[i] for i in indices))
        return pull(results)

    return gradients


@WITH_BIAS
def test_only_what_is_not_differentiated_is_one_call(has_bias, monkeypatch):
    operands = shapes_of([50, 90], has_bias=has_bias)
    mlp = functools.partial(experts, VARIANTS["plain"])
    assert targets(monkeypatch, mlp, *operands)[SCALED] == [GATE]
    assert count_calls(monkeypatch, mlp, *operands) == {SCALED: 1, MATMUL: 1}
    separate = functools.partial(by_separate_calls, VARIANTS["plain"])
    assert count_calls(monkeypatch, separate, *operands) == {MATMUL: 2, SILU: 1}
    wanted = {MATMUL: 6 + has_bias, SILU: 2, SILU_GRAD: 1}
    assert count_calls(monkeypatch, gradients_of(mlp), *operands) == wanted


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_compute_again_what_they_do_in_separate_calls(name, monkeypatch):
    operands = shapes_of([50, 90], has_bias=True)
    calls = [
        count_calls(
            monkeypatch,
            gradients_of(CHECKPOINTS[name](functools.partial(function, VARIANTS["plain"]))),
            *operands,
        )
        for function in (experts, by_differentiable_calls)
    ]
    assert calls[0] == calls[1]
    assert SCALED not in calls[0]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_gradient_keeps_what_it_does_in_separate_calls(name):
    rows, *arrays, offsets = shapes_of([50, 90], has_bias=True)

    def kept(function):
        wrapped = CHECKPOINTS[name](functools.partial(function, VARIANTS["plain"]))

        def residuals(rows, *arrays):
            return jax.vjp(lambda *x: wrapped(rows, *x, np.uint32([0, 50, 140])), *arrays)[1]

        found = jax.tree.leaves(jax.eval_shape(residuals, rows, *arrays))
        return sorted((x.shape, x.dtype.name) for x in found if x.size > 100)

    assert kept(experts) == kept(by_differentiable_calls)


@pytest.mark.parametrize("layout", ["transposed", "row_major"])
@pytest.mark.parametrize("differentiable", [True, False])
def test_experts_of_a_layer_are_two_calls(differentiable, layout, monkeypatch):
    case = CASES["transposed"].replace(max_tokens=64)
    group, n_local = closed_group(case, "cuda"), case.n_experts // case.n_ranks
    quantize = functools.partial(jax_ep.quantize_weights, differentiable=differentiable)
    given = {"gate_up_bias": jnp.ones((n_local, 256)), "down_bias": jnp.ones((n_local, 128))}
    given = {name: x.astype(jnp.bfloat16) for name, x in given.items()}

    def layer(tokens, topk_ids):
        rows = jax_ep.dispatch(group, tokens, topk_ids)
        shapes = (n_local, 128, 256), (n_local, 128, 128)
        weights = [quantize(jnp.ones(shape, jnp.bfloat16)) for shape in shapes]
        return jax_ep.expert_mlp(rows, *weights, **given, interleaved=True, clamp=(1.0, 2.0))

    def gradient(tokens, topk_ids):
        return jax.grad(lambda x: jnp.sum(layer(x, topk_ids).astype(jnp.float32) ** 2))(tokens)

    operands = [np.stack(each) for each in suite.make_inputs(case).arrays()[:2]]
    calls = count_calls(monkeypatch, on_mesh(group.mesh, layer), *operands)
    assert {SCALED: 1, MATMUL: 1}.items() <= calls.items() and SILU not in calls
    calls = count_calls(monkeypatch, on_mesh(group.mesh, gradient), *operands)
    assert {SILU: 2, MATMUL: 4, SILU_GRAD: 1}.items() <= calls.items() and SCALED not in calls
