"""Token formats: what travels per token from a source rank to an expert's rank."""

from jax_ep.formats.base import Quantized as Quantized
from jax_ep.formats.base import QuantizedFormat as QuantizedFormat
from jax_ep.formats.base import TokenFormat as TokenFormat
from jax_ep.formats.blockwise_fp8 import BlockwiseFP8 as BlockwiseFP8
from jax_ep.formats.mx import MXFP4 as MXFP4
from jax_ep.formats.mx import MXFP8 as MXFP8
from jax_ep.formats.nvfp4 import NVFP4 as NVFP4
from jax_ep.formats.plain import BF16 as BF16
from jax_ep.formats.plain import Plain as Plain
from jax_ep.formats.scales import ScalesLayout as ScalesLayout
