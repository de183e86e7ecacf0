"""Mixture-of-Experts expert parallelism for JAX: dispatch and combine."""

from jax_ep.config import EPConfig
from jax_ep.dequantize import dequantize
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
from jax_ep.fused_silu import QuantizedRows, fused_silu
from jax_ep.group import EPGroup, ep_init
from jax_ep.ops import (
    combine,
    combine_async,
    combine_wait,
    dispatch,
    dispatch_async,
    dispatch_wait,
)
from jax_ep.plot import plot_traffic
from jax_ep.results import Dispatched, InFlight
from jax_ep.stats import RankStats
from jax_ep.transports import COMBINE_NAME, DISPATCH_NAME

__version__ = "0.1.0"

__all__ = [
    "BF16",
    "BlockwiseFP8",
    "COMBINE_NAME",
    "DISPATCH_NAME",
    "Dispatched",
    "EPConfig",
    "EPGroup",
    "InFlight",
    "MXFP4",
    "MXFP8",
    "NVFP4",
    "Plain",
    "Quantized",
    "QuantizedFormat",
    "QuantizedRows",
    "RankStats",
    "TokenFormat",
    "combine",
    "combine_async",
    "combine_wait",
    "dequantize",
    "dispatch",
    "dispatch_async",
    "dispatch_wait",
    "ep_init",
    "fused_silu",
    "plot_traffic",
]
