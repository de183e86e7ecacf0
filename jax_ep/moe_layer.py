"""moe: dispatch, experts and combine as one call, whose backward can hide an exchange.

The gradients of the experts' weights need no exchange, and nothing in the backward needs them. So,
with `overlap`, they are computed last, while the gradients of the rows return to their tokens.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax

from jax_ep.exchange import checks
from jax_ep.exchange.operands import DispatchOperands
from jax_ep.exchange.overlap import CotangentSlots, finish_beside
from jax_ep.exchange.split import split
from jax_ep.formats import Quantized, QuantizedFormat
from jax_ep.group import EPGroup, check_group
from jax_ep.layer.expert_mlp import expert_mlp
from jax_ep.layer.expert_weights import ExpertWeights
from jax_ep.layer.fused_silu import check_activation
from jax_ep.layer.quantize_weights import QuantizedWeights
from jax_ep.ops import combine, dispatch
from jax_ep.results import Dispatched


def moe(
    group: EPGroup,
    tokens: jax.Array | Quantized,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    gate_up: jax.Array | QuantizedWeights,
    down: jax.Array | QuantizedWeights,
    *,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    transposed: bool = False,
    interleaved: bool = False,
    clamp: tuple[float, float] | None = None,
    overlap: bool = False,
) -> jax.Array:
    """The whole layer: `dispatch`, `expert_mlp` and `combine`, with the weights at dispatch.

    The following three calls give the same bits, in gradients too:

    ```python
    rows = jax_ep.dispatch(group, tokens, topk_ids, topk_weights)
    results = jax_ep.expert_mlp(rows, gate_up, down)
    out = jax_ep.combine(group, results, rows)
    ```

    Inside `moe`, results have the same names for policies of `jax.checkpoint`. Only the three calls
    tell how many rows were dropped.

    Args:
        group: from `ep_init`.
        tokens: `[..., H]`, as for `dispatch`.
        topk_ids: `[..., K]`, as for `dispatch`.
        topk_weights: `[..., K]`, or None for sums without weights.
        gate_up: `[L + se, H, 2 F]`, as for `expert_mlp`.
        down: `[L + se, F, H]`.
        gate_up_bias: `[L + se, 2 F]` or None.
        down_bias: `[L + se, H]` or None.
        transposed: whether the weights are `[L + se, 2 F, H]` and `[L + se, H, F]`.
        interleaved: whether gate and up columns alternate, as in `fused_silu`.
        clamp: `(alpha, limit)`, as in `fused_silu`.
        overlap: whether the backward on `p2p` computes the gradients of the experts' weights and
            biases while the gradients of the tokens return, on `config.n_sms` multiprocessors. On
            two GPUs, that takes more time (docs/overlap.md). Ignored on other transports, and for
            float16 rows and for rows or weights that are quantized.

    Returns:
        `[..., H]` in `config.combine_dtype`.

    Raises:
        TypeError: as for the three calls, whose names messages begin with. While tracing.
        ValueError: as for the three calls; or `overlap` is neither True nor False.
        jax.errors.JaxRuntimeError: as for `dispatch`.
    """
    call = check_group("dispatch", group)
    clamp = check_activation(group.geometry.call("expert_mlp"), interleaved, clamp)
    checks.check_flags("moe", overlap=overlap)
    layer = _Layer(group, transposed, interleaved, clamp, overlap)
    weights = ExpertWeights(gate_up, down, gate_up_bias, down_bias)
    if _has_codes(group, weights):
        dispatched = dispatch(group, tokens, topk_ids, topk_weights)
        return layer.finish(dispatched, weights)
    weights = ExpertWeights(*checks.as_arrays("expert_mlp", **weights._asdict()))
    operands, topk_ids = DispatchOperands.make(
        call, group.geometry, tokens, topk_ids, topk_weights, None, None
    )
    given = tuple(operands.with_gradients())
    nothing: Any = None
    routing = dataclasses.replace(operands, tokens=nothing, topk_weights=None)
    weights, _ = checks.vary_alike((), weights, given)
    # Under a jit, since a jax.shard_map that runs eagerly has no symbolic zeros; under one of its
    # own, since a former trace may be of an equal group that is closed by now.
    run = jax.jit(functools.partial(_moe, layer), inline=True)
    with jax.disable_jit(False):
        return run(given, routing, topk_ids, weights)


def _has_codes(group: EPGroup, weights: ExpertWeights) -> bool:
    """Whether rows or weights are quantized.

    The gradient of quantized rows returns to the tokens in the backward of `dequantize`, not of
    dispatch, and does not overlap.
    """
    is_quantized = isinstance(group.config.token_format, QuantizedFormat)
    return is_quantized or any(isinstance(x, QuantizedWeights) for x in weights)


class _Rows(NamedTuple):
    """What has gradients of a dispatch's result."""

    tokens: jax.Array
    row_weights: jax.Array | None


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The layer without its arrays."""

    group: EPGroup
    transposed: bool
    interleaved: bool
    clamp: tuple[float, float] | None
    overlap: bool

    def start(
        self, operands: DispatchOperands, topk_ids: jax.Array, slots: CotangentSlots | None = None
    ) -> Dispatched:
        """The dispatch; `slots` are those of its backward."""
        results = self.group._connection.dispatch_with(operands, slots)
        return Dispatched.make(self.group, topk_ids, operands, results)

    def finish(self, dispatched: Dispatched, weights: ExpertWeights) -> jax.Array:
        """The experts and the combine."""
        results = expert_mlp(
            dispatched,
            **weights._asdict(),
            transposed=self.transposed,
            interleaved=self.interleaved,
            clamp=self.clamp,
        )
        return combine(self.group, results, dispatched)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _moe(
    layer: _Layer,
    given: tuple[jax.Array, ...],
    routing: DispatchOperands,
    topk_ids: jax.Array,
    weights: ExpertWeights,
) -> jax.Array:
    """`given` are the operands of dispatch that have gradients, `routing` the others."""
    return layer.finish(layer.start(routing.replace(given), topk_ids), weights)


class _Saved(NamedTuple):
    """The backwards of the layer's parts, pytrees of their residuals."""

    of_dispatch: Any  # gradients of rows -> those of `given`, and of the slots
    of_rest: Any  # the output's gradient -> those of rows and of weights


def _moe_fwd(layer: _Layer, given: Any, routing: Any, topk_ids: Any, weights: Any) -> Any:
    overlaps = layer.overlap and _has_gradient(given) and _has_gradient(weights)
    given, routing, topk_ids, weights = map(_values, (given, routing, topk_ids, weights))
    slots = layer.group._connection.make_slots(routing.replace(given)) if overlaps else None

    def start(given: Any, slots: Any) -> tuple[_Rows, Dispatched]:
        dispatched = layer.start(routing.replace(given), topk_ids, slots)
        return _Rows(dispatched.tokens, dispatched.row_weights), dispatched

    def finish(rows: _Rows, weights: ExpertWeights) -> jax.Array:
        return layer.finish(dataclasses.replace(dispatched, **rows._asdict()), weights)

    rows, of_dispatch, dispatched = jax.vjp(start, given, slots, has_aux=True)
    out, of_rest = jax.vjp(finish, rows, weights)
    return out, _Saved(of_dispatch, of_rest)


def _moe_bwd(layer: _Layer, saved: _Saved, cotangent: jax.Array) -> Any:
    of_rows, rest = split(lambda pull, x: pull(x), saved.of_rest, cotangent)
    of_given, slots = saved.of_dispatch(of_rows)
    if slots is None:
        return of_given, None, None, rest.run(*rest.operands)
    of_given, of_weights = finish_beside(of_given, slots, rest)
    return of_given, None, None, of_weights


# With symbolic zeros, the rules know which arguments have gradients.
_moe.defvjp(_moe_fwd, _moe_bwd, symbolic_zeros=True)


def _has_gradient(tree: Any) -> bool:
    return any(leaf.perturbed for leaf in jax.tree.leaves(tree))


def _values(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.value, tree)
