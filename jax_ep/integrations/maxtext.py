"""MaxText's `RoutedMoE`, with dispatch and combine for its exchange.

`install` puts `Exchange` before MaxText's class. MaxText then takes each device for the only one of
its expert parallelism: it exchanges nothing, and its grouped matmuls run on the rows that `permute`
returns. All else stays MaxText's: routing, losses, weights, matmuls, biases, checkpoint names.
"""

import importlib
import sys
import types
from fractions import Fraction
from typing import Any

import jax

import jax_ep
from jax_ep.integrations.groups import group_of

# Options that must have one value, and why; MaxText itself requires the first of many others.
_REQUIRED = {
    "use_ring_of_experts": (False, "it gathers tokens instead of sending them to their experts"),
    "sparse_matmul": (True, "dense matmuls exchange no tokens"),
    "te_moe_block": (False, "Transformer Engine would exchange the tokens"),
    "shard_exp_on_fsdp": (False, "each device would have all experts"),
    "use_2d_fsdp_sharding": (False, "each device would have all experts"),
    "using_pipeline_parallelism": (False, "vmap takes an axis of the mesh from the exchange"),
}
_Base: Any = object  # MaxText's RoutedMoE, once `install` has combined the two


def install(transport: str = "auto", **options: Any) -> None:
    """Makes every `RoutedMoE` of models created from now on exchange tokens by jax_ep.

    Call it before MaxText creates a model, in every process. MaxText's option
    `ragged_buffer_factor` f sets `recv_capacity` to f times the mean, `T * top_k` rows; rows beyond
    it are dropped, and `moe_has_overflow` says so. With f <= 0, MaxText's default, nothing is
    dropped. A further call replaces the transport and options of the one before.

    Args:
        transport: as for `ep_init`.
        options: further parameters of `EPConfig`, such as `n_sms`; sizes and dtypes are MaxText's.

    Raises:
        ImportError: MaxText is not installed.
        ValueError: the configuration of a model that is created later does not fit; the message
            names the option.
    """
    try:
        moe = importlib.import_module("maxtext.layers.moe")
    except ImportError as error:
        raise ImportError(
            "jax_ep.integrations.maxtext.install needs MaxText 0.2.5; see docs/recipes/maxtext.md."
        ) from error
    found = moe.RoutedMoE
    base = found.__bases__[1] if issubclass(found, Exchange) else found
    members = {"__module__": base.__module__, "transport": transport, "options": options}
    # MaxText looks for the class by its name.
    made = types.new_class("RoutedMoE", (Exchange, base), exec_body=lambda ns: ns.update(members))
    for name, module in list(sys.modules.items()):
        if name.startswith("maxtext.") and vars(module).get("RoutedMoE") is found:
            vars(module)["RoutedMoE"] = made


def check(config: Any) -> None:
    """Raises ValueError for a configuration of MaxText that does not fit."""
    for option, (required, why) in _REQUIRED.items():
        if (got := getattr(config, option)) != required:
            raise ValueError(
                f"MaxText's {option} must be {required} with jax_ep; got {got}. Otherwise {why}."
            )
    if str(config.attention).startswith("vllm"):
        raise ValueError(
            "MaxText's attention must not be vLLM's with jax_ep, as the experts would be, too; "
            f"got {config.attention}."
        )


class Exchange(_Base):
    """The methods of MaxText's `RoutedMoE` that exchange tokens."""

    transport: str = "auto"
    options: dict[str, Any] = {}

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        check(config)
        super().__init__(config, *args, **kwargs)

    def get_expert_parallelism_size(self) -> int:
        """One: to MaxText, the rows of a device are all rows, and its experts all experts."""
        return 1

    def permute(
        self,
        inputs: jax.Array,  # [B, S, H]
        gate_logits: jax.Array,
        pre_bias_logits: jax.Array | None,
        use_custom_sort_vjp: bool = True,
        rngs: Any = None,
        *,
        input_ids: jax.Array | None = None,
        forced_routed_experts: jax.Array | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Routes and dispatches. The second result, for `unpermute`, is the `Dispatched`."""
        weights, ids = self.get_topk(
            gate_logits, pre_bias_logits, rngs, input_ids, forced_routed_experts
        )
        # For the losses; the rest, which is its sorting, is dead code.
        permuted = super().permute(
            inputs, gate_logits, pre_bias_logits, precomputed_topk=(weights, ids), **kwargs
        )
        lb_loss, bias_updates = permuted[5:7]
        if lb_loss is not None:  # that of this device's tokens
            lb_loss = jax.lax.pmean(lb_loss, self.mesh.axis_names)
        if self.config.decoder_block.value == "llama4":  # weights tokens before the experts
            inputs = (inputs * jax.nn.sigmoid(weights.astype("float32"))).astype(self.dtype)
            weights = None
        rows = self._dispatch(inputs, ids, weights)
        routed = (rows.tokens, rows, weights, rows.group_sizes, rows.row_expert_ids)
        return *routed, lb_loss, bias_updates, None, False, None, None

    def _dispatch(self, tokens: jax.Array, ids: Any, weights: Any) -> jax_ep.Dispatched:
        config = jax_ep.EPConfig(
            n_experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            hidden_size=tokens.shape[-1],
            max_tokens_per_rank=tokens.shape[0] * tokens.shape[1],
            token_format=jax_ep.Plain(self.dtype),
            combine_dtype=self.dtype,
            **self.options,
        )
        axis = self._expert_parallelism_name
        group = group_of(self.mesh, axis, config, self.transport)
        factor = self.get_ragged_buffer_factor()
        capacity = int(Fraction(str(factor)) * ids.size) if factor > 0 else None
        return jax_ep.dispatch(group, tokens, ids, weights, recv_capacity=capacity)

    def unpermute(
        self, intermediate: jax.Array, rows: jax_ep.Dispatched, *args: Any, **kwargs: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Combines; also says how many rows were dropped, in the rank of the output."""
        output = jax_ep.combine(rows.group, intermediate, rows)
        return output, rows.n_dropped.reshape(1, 1, 1)

    def sparse_matmul(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """MaxText's own, around these methods."""
        (output, n_dropped), *rest = super().sparse_matmul(*args, **kwargs)
        intermediate = importlib.import_module("flax.nnx").Intermediate
        self.sow(intermediate, "moe_has_overflow", n_dropped > 0)
        return output, *rest
