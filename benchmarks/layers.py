"""Expert layers: dispatch, the experts' gated MLP, combine. Also the parts, and dense matmuls.

The dense matmuls have as many operations as a rank's experts with uniform routing: what the GPU can
reach. All multiply normal numbers; with others, a GPU's power limit lowers its clock less.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

import jax_ep
from case import Case
from implementations import Implementation
from programs import Step, on_mesh, with_gradients

_N_CHECKED = 2  # tokens
_MIN_COSINE = 0.996  # of quantized layers; others have the smaller error below
_MAX_ERROR = 0.02  # norm of the difference, relative


def make_weights(mesh: Mesh, case: Case) -> tuple[Any, Any]:
    """Returns gate_up, `[E, H, 2 F]`, and down, `[E, F, H]`; for FP8 with all their codes."""
    n_local, size = case.n_experts // case.n_ranks, case.expert_size
    shapes = (case.hidden_size, 2 * size), (size, case.hidden_size)

    def make(rank):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(5), rank[0]), (2, n_local))

        def normal(shape):
            scale = shape[0] ** -0.5
            return lambda key: (jax.random.normal(key, shape) * scale).astype(jnp.bfloat16)

        return tuple(lax.map(normal(s), k) for s, k in zip(shapes, keys, strict=True))

    def quantized(weights):
        one = functools.partial(quantize_by_expert, fp8_gradients=True)
        return tuple(dataclasses.replace(one(each), source=each) for each in weights)

    weights = on_mesh(mesh, make)(np.arange(case.n_ranks))
    return on_mesh(mesh, quantized)(weights) if case.is_quantized else weights


def quantize_by_expert(weights: jax.Array, **options: bool) -> jax_ep.QuantizedWeights:
    """Quantizes one matrix after the other, which takes less memory than all at once."""
    one = functools.partial(jax_ep.quantize_weights, differentiable=False, **options)
    return jax.tree.map(lambda x: x[:, 0], lax.map(lambda matrix: one(matrix[None]), weights))


def _experts(implementation: Implementation, rows: Any, weights: Any) -> jax.Array:
    """The experts' MLP: ours, or that of plain JAX in the baselines."""
    if implementation.group is not None:
        return jax_ep.expert_mlp(rows, *weights)
    sizes = jnp.diff(rows.row_offsets.astype(jnp.int32))
    gate, up = jnp.split(lax.ragged_dot(rows.tokens, weights[0], sizes), 2, axis=1)
    return lax.ragged_dot(jax.nn.silu(gate) * up, weights[1], sizes)


def _layer(ours: Implementation) -> Step:
    def next(tokens, ids, weights, parameters, hide):
        rows = ours.dispatch(tokens, ids, weights)
        results = _experts(ours, rows, parameters)
        return ours.combine(results, rows, weights), {"row_offsets": rows.row_offsets}

    return Step(next)


def _layer_with_gradients(ours: Implementation, **without: None) -> Step:
    """Gradients in tokens, weights of choices and parameters, in FP8 `without` some codes."""
    forward = _layer(ours).next

    def next(tokens, ids, weights, parameters, hide):
        if not isinstance(parameters[0], jax_ep.QuantizedWeights):
            return with_gradients(Step(forward)).next(tokens, ids, weights, parameters, hide)

        def of_sources(tokens, ids, weights, given, hide):
            both = map(lambda x, s: dataclasses.replace(x, source=s, **without), parameters, given)
            return forward(tokens, ids, weights, [*both], hide)

        sources = [each.source for each in parameters]
        return with_gradients(Step(of_sources)).next(tokens, ids, weights, sources, hide)

    return Step(next)


def _experts_alone(implementation: Implementation, *, with_grad: bool = False) -> Step:
    """The experts' MLP, and its gradients in rows and parameters. The state has dispatched rows."""

    def start(tokens, ids, weights):
        return tokens, implementation.dispatch(tokens, ids, weights)

    def next(state, ids, weights, parameters, hide):
        def run(tokens, parameters):
            rows = dataclasses.replace(state[1], tokens=tokens)
            return _experts(implementation, rows, parameters)

        if not with_grad:
            return state, {"results": hide(run(state[1].tokens, parameters))[:1]}
        out, backward = jax.vjp(run, state[1].tokens, parameters)
        d_tokens, d_parameters = hide(backward(out))
        return state, {"d_tokens": d_tokens[:1], "d": [d[:1, :1] for d in d_parameters]}

    return Step(next, start)


def _dense(implementation: Implementation) -> Step:
    """As many rows as tokens have choices, through one expert's matrices."""

    def start(tokens, ids, weights):
        return tokens, jnp.repeat(tokens, ids.shape[1], axis=0)

    def next(state, ids, weights, parameters, hide):
        tokens, rows = state
        gate_up, down = (x[0] for x in parameters)
        values = hide(rows @ gate_up)[:, : down.shape[0]]
        rows = hide(values @ down)
        return (tokens, rows), {"rows": rows[:1]}

    return Step(next, start)


# Steps of an implementation, by the name of the operation.
STEPS: dict[str, Callable[[Implementation], Step]] = {
    "layer": _layer,
    "layer + grad": functools.partial(_layer_with_gradients, gradient_codes=None),
    "layer + grad in FP8": _layer_with_gradients,
    "experts": _experts_alone,
    "experts + grad": functools.partial(_experts_alone, with_grad=True),
    "dense matmuls": _dense,
}


def check(case: Case, operands: tuple, parameters: tuple, out: jax.Array) -> str | None:
    """Compares tokens of a layer's result with NumPy's; returns what is wrong."""
    tokens, ids, weights = (np.asarray(x[:_N_CHECKED], np.float32) for x in operands)
    wanted = np.zeros_like(tokens)
    for t, k in np.ndindex(ids.shape):
        if ids[t, k] >= 0:
            gate_up, down = (_matrix(x, int(ids[t, k])) for x in parameters)
            gate, up = np.split(tokens[t] @ gate_up, 2)
            wanted[t] += weights[t, k] * (gate / (1 + np.exp(-gate)) * up) @ down
    got = np.asarray(out[:_N_CHECKED], np.float32)
    size = np.linalg.norm(wanted)
    cosine = float(np.sum(got * wanted) / np.linalg.norm(got) / size)
    error = float(np.linalg.norm(got - wanted) / size)
    if cosine >= _MIN_COSINE if case.is_quantized else error <= _MAX_ERROR:
        return None
    return f"a token's result must be near NumPy's; cosine {cosine:.4f}, error {error:.3g}"


def _matrix(weights: Any, expert: int) -> np.ndarray:
    """One expert's matrix in float32."""
    if not isinstance(weights, jax_ep.QuantizedWeights):
        return np.asarray(weights[expert], np.float32)
    codes, scales = (np.asarray(x[expert], np.float32) for x in (weights.codes, weights.scales))
    by_element = np.repeat(np.repeat(scales, 128, 0)[: len(codes)], 128, 1)
    return (codes * by_element).T
