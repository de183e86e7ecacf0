"""Token formats: what travels per token from a source rank to an expert's rank."""

from collections.abc import Callable

import jax.numpy as jnp

from jax_ep.formats.base import Quantized as Quantized
from jax_ep.formats.base import QuantizedFormat as QuantizedFormat
from jax_ep.formats.base import TokenFormat as TokenFormat
from jax_ep.formats.plain import BF16 as BF16
from jax_ep.formats.plain import Plain as Plain
from jax_ep.formats.quantized import MXFP4 as MXFP4
from jax_ep.formats.quantized import MXFP8 as MXFP8
from jax_ep.formats.quantized import NVFP4 as NVFP4
from jax_ep.formats.quantized import BlockwiseFP8 as BlockwiseFP8
from jax_ep.formats.scales import ScalesLayout as ScalesLayout

# The formats that quantize, by name.
QUANTIZED: dict[str, type[QuantizedFormat]] = {
    each.name: each for each in (BlockwiseFP8, MXFP8, MXFP4, NVFP4)
}
# Constructors of all formats, by name; formats that quantize have defaults.
FORMATS: dict[str, Callable[[], TokenFormat]] = {
    "bf16": BF16,
    "f16": lambda: Plain(jnp.float16),
    "f32": lambda: Plain(jnp.float32),
    **QUANTIZED,
}
