"""Token formats: what travels per token from a source rank to an expert's rank."""

from jax_ep.formats.base import Quantized, QuantizedFormat, TokenFormat
from jax_ep.formats.blockwise_fp8 import BlockwiseFP8
from jax_ep.formats.mx import MXFP4, MXFP8
from jax_ep.formats.nvfp4 import NVFP4
from jax_ep.formats.plain import BF16, Plain
from jax_ep.formats.scales import ScalesLayout

__all__ = [
    "BF16",
    "BlockwiseFP8",
    "MXFP4",
    "MXFP8",
    "NVFP4",
    "Plain",
    "Quantized",
    "QuantizedFormat",
    "ScalesLayout",
    "TokenFormat",
]
