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
from jax_ep.router import RouterConfig, balance_loss, expert_load, route, z_loss

# Parameters that each expert has of its own.
BY_EXPERT = ("gate_up", "down", "gate_up_bias", "down_bias", "gate_up_scales", "down_scales")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forward:
    """The layer on one rank; static parameters here, those of `MoE`; arrays in the call."""

    group: EPGroup
    router_config: RouterConfig
    token_axes: P  # of each dimension of the tokens
    fsdp_axes: tuple[str, ...]
    balance_per_sequence: bool
    capacity_factor: float | None
    capacity_axes: tuple[str, ...]
    on_limit: str
    expert_fn: Callable[..., jax.Array]
    fp8_matmuls: bool
    transposed: bool
    interleaved: bool
    clamp: tuple[float, float] | None

    def __call__(
        self, weights: dict[str, Any], tokens: jax.Array, mask: jax.Array | None
    ) -> tuple[jax.Array, MoEReport]:
        """The output and the report, from the device's shards: weights by `MoE`'s names."""
        group, config = self.group, self.group.config
        if mask is not None:  # zeros times anything that padding holds would not be zero
            tokens = jnp.where(mask[..., None], tokens, 0)
        with jax.named_scope("router"):
            logits = jnp.matmul(tokens.astype(jnp.float32), weights["router"], precision="highest")
            if "logit_bias" in weights:
                logits += jnp.broadcast_to(weights["logit_bias"], logits.shape)
            routes = route(self.router_config, logits, config.top_k, weights.get("router_bias"))
            ids = (
                routes.topk_ids if mask is None else jnp.where(mask[..., None], routes.topk_ids, -1)
            )
            n_experts = logits.shape[-1]
            kept, n_limited = self._limit(ids, n_experts)
            placed = PlacedChoices(kept, jnp.zeros_like(kept, shape=()))
            if "placement" in weights:
                placed = place_choices(group, kept, weights["placement"])
        with jax.named_scope("dispatch"):
            dtypes = config.token_format.token_dtypes
            sent = tokens if tokens.dtype in dtypes else tokens.astype(dtypes[0])
            rows = dispatch(group, sent, placed.topk_ids, routes.topk_weights)
        with jax.named_scope("experts"):
            results = self._run_experts(rows, weights)
        with jax.named_scope("combine"):
            output = combine(group, results, rows)
            if config.skip_a2a:
                output = lax.psum(output, group.axis_name)
            if mask is not None and config.fused_shared_expert:  # `expert_fn` may change zeros
                output = jnp.where(mask[..., None], output, 0)
        if "shared_down" in weights and not config.fused_shared_expert:
            with jax.named_scope("shared_expert"):
                output += self._shared_expert(tokens.astype(output.dtype), weights)

        axes, per_sequence = axes_of(self.token_axes), self.balance_per_sequence
        all_axes = tuple(dict.fromkeys((*axes, *group.geometry.axis_names)))
        report = MoEReport(
            balance_loss=balance_loss(
                routes.scores,
                ids,
                per_sequence=per_sequence,
                axis_name=axes,
                sequence_axis_name=axes_of_dimension(self.token_axes, tokens.ndim - 2),
            ),
            z_loss=z_loss(logits, ids, axis_name=axes),
            expert_load=expert_load(ids, n_experts, axes),
            n_limited=lax.psum(n_limited, axes),
            n_dropped=lax.psum(rows.n_dropped, all_axes),
            topk_ids=ids,
            n_unserved=lax.psum(placed.n_unserved, axes),
        )
        return output.astype(tokens.dtype), report

    def _limit(self, topk_ids: jax.Array, n_experts: int) -> tuple[jax.Array, jax.Array]:
        """The choices that experts keep, -1 in place of others; how many of this rank's those are.

        With `on_limit="raise"`, the program fails where it uses the former, if there are any.
        """
        group, axes, factor = self.group, self.capacity_axes, self.capacity_factor
        if factor is None:
            return topk_ids, jnp.zeros((), jnp.int32)
        n_choices = topk_ids.size * count_shards(group, axes)
        capacity = math.ceil(Fraction(str(factor)) * n_choices / n_experts)
        kept = limit_choices(topk_ids, n_experts, capacity, axis_name=axes)
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
        return self.expert_fn(
            rows, *matrices, gate_up_bias=of_gate_up, down_bias=of_down, **options
        )

    def _expert_weights(self, weights: dict[str, jax.Array]) -> tuple[list[Any], list[Any]]:
        """The matrices and the biases, or None, of gate_up and down."""
        biases = [weights.get(name) for name in ("gate_up_bias", "down_bias")]
        if "gate_up_scales" in weights:
            stored = [(weights[name], weights[f"{name}_scales"]) for name in ("gate_up", "down")]
            return [QuantizedWeights(*each, None, transposed=False) for each in stored], biases
        gate_up, down = [self._gather(name, weights[name]) for name in ("gate_up", "down")]
        if self.group.config.fused_shared_expert:
            gate_up = jnp.concatenate([weights["shared_gate_up"][None], gate_up])
            down = jnp.concatenate([weights["shared_down"][None], down])
            biases = [None if x is None else jnp.pad(x, ((1, 0), (0, 0))) for x in biases]
        matrices: list[Any] = [gate_up, down]
        if self.fp8_matmuls:
            matrices = [quantize_weights(each, transposed=self.transposed) for each in matrices]
        return matrices, biases

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
