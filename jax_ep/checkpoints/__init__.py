"""Checkpoints of other frameworks: their tensors to the parameters of `nnx.MoE`, and back.

Needs the extra `nnx`, and no library of checkpoints: tensors come from any mapping of keys to what
can be sliced. Layers are loaded shard by shard, so no device and no host holds all experts.
"""

from jax_ep.checkpoints.layout import Layout
from jax_ep.checkpoints.models import DEEPSEEK_V3, GPT_OSS, MIXTRAL, QWEN3_MOE, from_config
from jax_ep.checkpoints.tensors import open_safetensors

__all__ = [
    "DEEPSEEK_V3",
    "GPT_OSS",
    "Layout",
    "MIXTRAL",
    "QWEN3_MOE",
    "from_config",
    "open_safetensors",
]
