"""Mixture-of-Experts expert parallelism for JAX: dispatch and combine."""

from jax_ep.config import EPConfig
from jax_ep.exchange.choices import count_choices, limit_choices
from jax_ep.exchange.copies import EXPERT_COPIES_NAME
from jax_ep.exchange.operands import COMBINE_NAME, DISPATCH_NAME
from jax_ep.ffi.extension import register_what_is_here as _register_what_is_here
from jax_ep.ffi.lowering import disabled_checks
from jax_ep.formats import (
    BF16,
    MXFP4,
    MXFP8,
    NVFP4,
    BlockwiseFP8,
    Plain,
    Quantized,
    QuantizedFormat,
    TokenFormat,
)
from jax_ep.group import EPGroup, ep_init
from jax_ep.layer.activation.api import QuantizedRows, fused_silu
from jax_ep.layer.dequantize import dequantize
from jax_ep.layer.expert_mlp import EXPERT_HIDDEN_NAME, expert_mlp
from jax_ep.layer.fetch_experts import fetch_experts
from jax_ep.layer.matmul.api import grouped_matmul, grouped_matmul_gradient
from jax_ep.layer.quantize_weights import QuantizedWeights, quantize_weights
from jax_ep.moe_layer import moe
from jax_ep.ops import (
    combine,
    combine_async,
    combine_wait,
    dispatch,
    dispatch_async,
    dispatch_wait,
    redispatch,
)
from jax_ep.placement.expert_placement import ExpertPlacement, PlacedChoices, place_choices
from jax_ep.placement.rebalance import rebalance
from jax_ep.placement.replicate import replicate_experts
from jax_ep.results import Dispatched, InFlight
from jax_ep.stats import RankStats, plot_traffic

__all__ = [
    "BF16",
    "BlockwiseFP8",
    "COMBINE_NAME",
    "DISPATCH_NAME",
    "Dispatched",
    "EPConfig",
    "EPGroup",
    "EXPERT_COPIES_NAME",
    "EXPERT_HIDDEN_NAME",
    "ExpertPlacement",
    "InFlight",
    "MXFP4",
    "MXFP8",
    "NVFP4",
    "PlacedChoices",
    "Plain",
    "Quantized",
    "QuantizedFormat",
    "QuantizedRows",
    "QuantizedWeights",
    "RankStats",
    "TokenFormat",
    "combine",
    "combine_async",
    "combine_wait",
    "count_choices",
    "dequantize",
    "disabled_checks",
    "dispatch",
    "dispatch_async",
    "dispatch_wait",
    "ep_init",
    "expert_mlp",
    "fetch_experts",
    "fused_silu",
    "grouped_matmul",
    "grouped_matmul_gradient",
    "limit_choices",
    "moe",
    "place_choices",
    "plot_traffic",
    "quantize_weights",
    "rebalance",
    "redispatch",
    "replicate_experts",
]

__version__ = "0.1.0"

_register_what_is_here()
