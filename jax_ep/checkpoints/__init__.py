"""Checkpoints of other frameworks: their tensors to the parameters of `nnx.MoE`, and back.

Needs the extra `nnx`, and no library of checkpoints: tensors come from any mapping of keys to what
can be sliced. Layers are loaded shard by shard, so no device and no host holds all experts.
"""

from jax_ep.checkpoints.layout import Layout
from jax_ep.checkpoints.tensors import open_safetensors

__all__ = ["DEEPSEEK_V3", "GPT_OSS", "Layout", "MIXTRAL", "QWEN3_MOE", "open_safetensors"]

QWEN3_MOE = Layout()
"""Qwen3-MoE, and others that name their tensors alike; also in FP8."""

MIXTRAL = Layout(
    prefix="model.layers.{}.block_sparse_moe.",
    gate_up=("experts.{}.w1.weight", "experts.{}.w3.weight"),
    down="experts.{}.w2.weight",
)
"""Mixtral."""

DEEPSEEK_V3 = Layout(
    router_bias="gate.e_score_correction_bias",
    shared_gate_up=("shared_experts.gate_proj.weight", "shared_experts.up_proj.weight"),
    shared_down="shared_experts.down_proj.weight",
)
"""DeepSeek-V3, also in FP8. Its `n_shared_experts` shared experts are stored as one."""

GPT_OSS = Layout(
    router="router.weight",
    logit_bias="router.bias",
    gate_up="experts.gate_up_proj",
    down="experts.down_proj",
    gate_up_bias="experts.gate_up_proj_bias",
    down_bias="experts.down_proj_bias",
    interleaved=True,
)
"""GPT-OSS, with experts in MXFP4, as published, or unquantized."""
