"""Published models: the layouts of their checkpoints, and the layers that these fill."""

from collections.abc import Mapping
from typing import Any

from jax_ep.checkpoints.layout import Layout
from jax_ep.router import RouterConfig

QWEN3_MOE = Layout()
"""Qwen3-MoE, also in FP8, and others that name their tensors alike."""

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
"""GPT-OSS, with experts in MXFP4, as published, or not quantized."""

_LAYOUTS = {
    "qwen3_moe": QWEN3_MOE,
    "mixtral": MIXTRAL,
    "deepseek_v3": DEEPSEEK_V3,
    "gpt_oss": GPT_OSS,
}
# Published files of Qwen3-MoE have the first name, those that transformers 5 saves the second.
_N_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def from_config(config: Mapping[str, Any]) -> tuple[Layout, dict[str, int], dict[str, Any]]:
    """What the `config.json` of a published model says of its MoE layers.

    Args:
        config: of a model whose `model_type` is `qwen3_moe`, `mixtral`, `deepseek_v3` or `gpt_oss`.

    Returns:
        The layout of the checkpoint.
        The arguments `n_experts`, `top_k` and `hidden_size` of `EPConfig`.
        The arguments of `nnx.MoE` that make it a layer of the model; others are up to you.

    Raises:
        ValueError: the `model_type` is another one, or `config` lacks a field of such a model.
    """
    model = config.get("model_type")
    if model not in _LAYOUTS:
        part = "config['text_config']" if "text_config" in config else "a Layout of your own"
        raise ValueError(
            f"model_type must be one of {', '.join(_LAYOUTS)}; got {model!r}. Use {part}."
        )

    def field(*names: str) -> Any:
        for name in names:
            if config.get(name) is not None:
                return config[name]
        raise ValueError(f"The config of {model} must have {' or '.join(names)}; got {[*config]}.")

    top_k, hidden_size = field("num_experts_per_tok"), field("hidden_size")
    sizes = {"n_experts": field(*_N_EXPERTS), "top_k": top_k, "hidden_size": hidden_size}
    expert_size = field("moe_intermediate_size", "intermediate_size")
    options: dict[str, Any] = {"expert_size": expert_size}
    if model == "qwen3_moe":
        options["router"] = RouterConfig(normalize=field("norm_topk_prob"))
    if model == "deepseek_v3":
        options["router"] = RouterConfig(
            scores="sigmoid",
            normalize=field("norm_topk_prob"),
            scaling=field("routed_scaling_factor"),
            n_expert_groups=field("n_group"),
            topk_expert_groups=field("topk_group"),
            group_scores="top2",
        )
        options |= {"router_bias": True, "shared_size": field("n_shared_experts") * expert_size}
    if model == "gpt_oss":
        options |= {"logit_bias": True, "expert_bias": True, "interleaved": True}
        options["clamp"] = 1.702, field("swiglu_limit")
    return _LAYOUTS[model], sizes, options
