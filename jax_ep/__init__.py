"""Mixture-of-Experts expert parallelism for JAX: dispatch and combine."""

from jax_ep.config import EPConfig as EPConfig
from jax_ep.formats import BF16 as BF16
from jax_ep.formats import MXFP4 as MXFP4
from jax_ep.formats import MXFP8 as MXFP8
from jax_ep.formats import NVFP4 as NVFP4
from jax_ep.formats import BlockwiseFP8 as BlockwiseFP8
from jax_ep.formats import Plain as Plain
from jax_ep.formats import Quantized as Quantized
from jax_ep.formats import QuantizedFormat as QuantizedFormat
from jax_ep.formats import TokenFormat as TokenFormat
from jax_ep.group import EPGroup as EPGroup
from jax_ep.group import ep_init as ep_init
from jax_ep.layer.dequantize import dequantize as dequantize
from jax_ep.layer.expert_mlp import EXPERT_HIDDEN_NAME as EXPERT_HIDDEN_NAME
from jax_ep.layer.expert_mlp import expert_mlp as expert_mlp
from jax_ep.layer.fused_silu import QuantizedRows as QuantizedRows
from jax_ep.layer.fused_silu import fused_silu as fused_silu
from jax_ep.layer.grouped_matmul import grouped_matmul as grouped_matmul
from jax_ep.layer.grouped_matmul import grouped_matmul_gradient as grouped_matmul_gradient
from jax_ep.layer.quantize_weights import QuantizedWeights as QuantizedWeights
from jax_ep.layer.quantize_weights import quantize_weights as quantize_weights
from jax_ep.moe_layer import moe as moe
from jax_ep.operands.calls import COMBINE_NAME as COMBINE_NAME
from jax_ep.operands.calls import DISPATCH_NAME as DISPATCH_NAME
from jax_ep.operands.choices import count_choices as count_choices
from jax_ep.operands.choices import limit_choices as limit_choices
from jax_ep.ops import combine as combine
from jax_ep.ops import combine_async as combine_async
from jax_ep.ops import combine_wait as combine_wait
from jax_ep.ops import dispatch as dispatch
from jax_ep.ops import dispatch_async as dispatch_async
from jax_ep.ops import dispatch_wait as dispatch_wait
from jax_ep.ops import redispatch as redispatch
from jax_ep.placement.choices import PlacedChoices as PlacedChoices
from jax_ep.placement.choices import place_choices as place_choices
from jax_ep.placement.expert_placement import ExpertPlacement as ExpertPlacement
from jax_ep.placement.rebalance import rebalance as rebalance
from jax_ep.placement.replicate import EXPERT_COPIES_NAME as EXPERT_COPIES_NAME
from jax_ep.placement.replicate import replicate_experts as replicate_experts
from jax_ep.plot import plot_traffic as plot_traffic
from jax_ep.results import Dispatched as Dispatched
from jax_ep.results import InFlight as InFlight
from jax_ep.stats import RankStats as RankStats
from jax_ep.xla_ffi.extension import register_what_is_here as _register_what_is_here
from jax_ep.xla_ffi.lowering import disabled_checks as disabled_checks

__version__ = "0.1.0"

_register_what_is_here()
