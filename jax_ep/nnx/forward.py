"""The computation of each rank of an MoE layer, inside `jax.shard_map`."""

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax import P, lax

from jax_ep.exchange.choices import limit_choices
from jax_ep.exchange.drops import raise_on_drops
from jax_ep.formats import Plain
from jax_ep.group import EPGroup, calls_of
from jax_ep.layer.activation.api import fused_silu
from jax_ep.layer.quantize_weights import QuantizedWeights, quantize_weights
from jax_ep.nnx.report import MoEReport
from jax_ep.nnx.state import hidden_axis
from jax_ep.nnx.token_axes import axes_of, axes_of_dimension, count_shards
from jax_ep.ops import combine, dispatch
from jax_ep.placement.expert_placement import PlacedChoices, place_choices
from jax_ep.placement.replicate import replicate_experts
from jax_ep.results import Dispatched
from jax_ep.router import RouterConfig, Routes, balance_loss, expert_load, route, z_loss

# Parameters that each expert has of its own.
BY_EXPERT = (
    *("gate_up", "down", "gate_up_bias", "down_bias", "gate_up_scales", "down_scales"),
    "expert_fn",  # its variables
)


def mask_tokens(tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """Zeros in place of padding: its product with zero may be NaN."""
    return jnp.where(mask[..., None], tokens, 0)


def router_logits(tokens: jax.Array, router: jax.Array, bias: jax.Array | None) -> jax.Array:
    """`float32[..., E]`, whatever JAX's settings of precision are."""
    logits = jnp.matmul(tokens.astype(jnp.float32), router, precision="highest")
    return logits if bias is None else logits + jnp.broadcast_to(bias, logits.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forward:
    """The layer on one rank; static parameters here, those of `MoE`; arrays in the call."""

    group: EPGroup
    router_config: RouterConfig
    n_experts: int  # logical ones
    token_axes: P  # of each dimension of the tokens
    fsdp_axes: tuple[str, ...]
    balance_per_sequence: bool
    capacity_factor: float | None
    capacity_axes: tuple[str, ...]
    on_limit: str
    weights_on_input: bool
    expert_fn: Callable[..., Any]  # with variables: of these, to what is called
    fp8_matmuls: bool
    fp8_gradients: bool
    transposed: bool
    interleaved: bool
    clamp: tuple[float, float] | None

    def __call__(
        self,
        weights: dict[str, Any],
        tokens: jax.Array,
        mask: jax.Array | None,
        routes: Routes | None,
    ) -> tuple[jax.Array, MoEReport]:
        """The output and the report, from the device's shards: weights by `MoE`'s names.

        `routes` are those of `router_fn`; None if there is none.
        """
        if mask is not None:
            tokens = mask_tokens(tokens, mask)
        with jax.named_scope("router"):
            routes = self._route(weights, tokens) if routes is None else routes
            if mask is not None:
                ids = jnp.where(mask[..., None], routes.topk_ids, -1)
                routes = routes._replace(topk_ids=ids)
            kept, n_limited = self._limit(routes.topk_ids)
            placed = PlacedChoices(kept, jnp.zeros_like(kept, shape=()))
            if "placement" in weights:
                placed = place_choices(self.group, kept, weights["placement"])
        with jax.named_scope("dispatch"):
            rows = self._dispatch(tokens, placed.topk_ids, routes.topk_weights)
        with jax.named_scope("experts"):
            results = self._run_experts(rows, weights)
        with jax.named_scope("combine"):
            output = self._combine(results, rows, mask)
        if "shared_down" in weights and not self.group.config.fused_shared_expert:
            with jax.named_scope("shared_expert"):
                output += self._shared_expert(tokens.astype(output.dtype), weights)
        with jax.named_scope("report"):
            counts = n_limited, rows.n_dropped, placed.n_unserved
            report = self._report(routes, tokens.ndim, *counts)
        return output.astype(tokens.dtype), report

    def _route(self, weights: dict[str, Any], tokens: jax.Array) -> Routes:
        logits = router_logits(tokens, weights["router"], weights.get("logit_bias"))
        top_k = self.group.config.top_k
        return route(self.router_config, logits, top_k, weights.get("router_bias"))

    def _dispatch(
        self, tokens: jax.Array, topk_ids: jax.Array, topk_weights: jax.Array | None
    ) -> Dispatched:
        if self.weights_on_input and topk_weights is not None:
            weights = topk_weights.astype(jnp.float32)  # [..., K=1]
            tokens, topk_weights = (tokens.astype(jnp.float32) * weights).astype(tokens.dtype), None
        dtypes = self.group.config.token_format.token_dtypes
        sent = tokens if tokens.dtype in dtypes else tokens.astype(dtypes[0])
        return dispatch(self.group, sent, topk_ids, topk_weights)

    def _combine(self, results: jax.Array, rows: Dispatched, mask: jax.Array | None) -> jax.Array:
        config = self.group.config
        output = combine(self.group, results, rows)
        if config.skip_a2a:
            output = lax.psum(output, self.group.axis_name)
        if mask is not None and config.fused_shared_expert:  # `expert_fn` may make zeros nonzero
            output = mask_tokens(output, mask)
        return output

    def _report(
        self,
        routes: Routes,
        n_dims: int,
        n_limited: jax.Array,
        n_dropped: jax.Array,
        n_unserved: jax.Array,
    ) -> MoEReport:
        """Sums over all shards; `n_dims` is that of the tokens."""
        ids, scores, logits = routes.topk_ids, routes.scores, routes.logits
        axes, none = axes_of(self.token_axes), jnp.zeros((), jnp.float32)
        all_axes = tuple(dict.fromkeys((*axes, *self.group.geometry.axis_names)))
        of_balance: dict[str, Any] = {
            "per_sequence": self.balance_per_sequence,
            "axis_name": axes,
            "sequence_axis_name": axes_of_dimension(self.token_axes, n_dims - 2),
        }
        return MoEReport(
            balance_loss=none if scores is None else balance_loss(scores, ids, **of_balance),
            z_loss=none if logits is None else z_loss(logits, ids, axis_name=axes),
            expert_load=expert_load(ids, self.n_experts, axes),
            n_limited=lax.psum(n_limited, axes),
            n_dropped=lax.psum(n_dropped, all_axes),
            topk_ids=ids,
            n_unserved=lax.psum(n_unserved, axes),
        )

    def _limit(self, topk_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The choices that experts keep, -1 in place of others; how many of this rank's those are.

        With `on_limit="raise"`, the program fails where it uses the former, if there are any.
        """
        group, axes, factor = self.group, self.capacity_axes, self.capacity_factor
        if factor is None:
            return topk_ids, jnp.zeros((), jnp.int32)
        n_choices = topk_ids.size * count_shards(group, axes)
        capacity = math.ceil(Fraction(str(factor)) * n_choices / self.n_experts)
        kept = limit_choices(topk_ids, self.n_experts, capacity, axis_name=axes)
        n_limited = jnp.sum(kept != topk_ids, dtype=jnp.int32)
        if self.on_limit == "raise":
            of = f"the ranks along {axes}" if axes else "a rank"

            def describe(where: str, _: int) -> str:
                return (
                    f"{group.geometry.call('nnx.MoE')}: choices must fit into capacity_factor="
                    f"{factor}, {capacity} of each expert by the tokens of {of}; {where}. Raise "
                    'capacity_factor, or balance the experts; with on_limit="count", they are '
                    "only counted."
                )

            all_gather = calls_of(group).all_gather
            kept += raise_on_drops(group.geometry, n_limited, describe, all_gather)
        return kept, n_limited

    def _run_experts(self, rows: Dispatched, weights: dict[str, Any]) -> jax.Array:
        """The results of this rank's groups of rows; the shared expert's come first."""
        if "placement" in weights:
            home = {name: weights[name] for name in BY_EXPERT if name in weights}
            weights = weights | replicate_experts(self.group, home, weights["placement"])
        matrices, (of_gate_up, of_down) = self._expert_weights(weights)
        options = self._activation
        if self.transposed and not self.fp8_matmuls:  # codes know
            options |= {"transposed": True}
        variables = weights.get("expert_fn")
        expert_fn = self.expert_fn if variables is None else self.expert_fn(variables)
        return expert_fn(rows, *matrices, gate_up_bias=of_gate_up, down_bias=of_down, **options)

    def _expert_weights(self, weights: dict[str, jax.Array]) -> tuple[list[Any], list[Any]]:
        """The matrices and the biases, or None, of gate_up and down."""
        biases = [weights.get(name) for name in ("gate_up_bias", "down_bias")]
        if "gate_up_scales" in weights:
            stored = [(weights[name], weights[f"{name}_scales"]) for name in ("gate_up", "down")]
            return [self._with_codes(*each) for each in stored], biases
        gate_up, down = [self._gather(name, weights[name]) for name in ("gate_up", "down")]
        if self.group.config.fused_shared_expert:
            gate_up = jnp.concatenate([weights["shared_gate_up"][None], gate_up])
            down = jnp.concatenate([weights["shared_down"][None], down])
            biases = [None if x is None else jnp.pad(x, ((1, 0), (0, 0))) for x in biases]
        matrices: list[Any] = [gate_up, down]
        if self.fp8_matmuls:
            options = dict(transposed=self.transposed, fp8_gradients=self.fp8_gradients)
            matrices = [quantize_weights(each, **options) for each in matrices]
        return matrices, biases

    def _with_codes(self, codes: jax.Array, scales: jax.Array) -> QuantizedWeights:
        gradient_codes = codes.swapaxes(1, 2) if self.fp8_gradients else None
        return QuantizedWeights(codes, scales, None, False, gradient_codes)

    def _shared_expert(self, tokens: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
        """The results for all of this rank's tokens, in their shape."""
        flat = tokens.reshape(-1, tokens.shape[-1])
        gate_up, down = weights["shared_gate_up"], weights["shared_down"]
        if self.transposed:
            gate_up, down = gate_up.T, down.T
        hidden, all_rows = flat @ gate_up, jnp.array([0, len(flat)], jnp.uint32)
        values = fused_silu(hidden, all_rows, Plain(hidden.dtype), **self._activation)
        assert isinstance(values, jax.Array)
        return (values @ down).reshape(tokens.shape)

    @property
    def _activation(self) -> dict[str, Any]:
        return {"interleaved": self.interleaved, "clamp": self.clamp}

    def _gather(self, name: str, matrices: jax.Array) -> jax.Array:
        """The shards along H; the gradient is a reduce-scatter."""
        if not self.fsdp_axes:
            return matrices
        axis = hidden_axis(name, self.transposed)
        return lax.all_gather(matrices, self.fsdp_axes, axis=axis, tiled=True)
