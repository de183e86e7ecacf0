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


def from_config(config: Mapping[str, Any]) -> tuple[Layout, dict[str, int], dict[str, Any]]:
    """What the `config.json` of a published model says of its MoE layers.

    Args:
        config: of a model whose `model_type` is `qwen3_moe`, `mixtral`, `deepseek_v3` or `gpt_oss`.

    Returns:
        The layout of the checkpoint; `EPConfig`'s arguments `n_experts`, `top_k` and `hidden_size`;
        and the arguments of `nnx.MoE` that make its layers the model's. Which layers have experts,
        and which of these arguments you add, such as `transposed`, is up to you.

    Raises:
        KeyError: `config` lacks a field.
        ValueError: the `model_type` is another one.
    """
    model = config.get("model_type")
    options: dict[str, Any]
    if model == "qwen3_moe":
        layout, n_experts, expert_size = QWEN3_MOE, "num_experts", "moe_intermediate_size"
        options = {"router": RouterConfig(normalize=config["norm_topk_prob"])}
    elif model == "mixtral":
        layout, n_experts, expert_size = MIXTRAL, "num_local_experts", "intermediate_size"
        options = {"router": RouterConfig()}
    elif model == "deepseek_v3":
        layout, n_experts, expert_size = DEEPSEEK_V3, "n_routed_experts", "moe_intermediate_size"
        router = RouterConfig(
            scores="sigmoid",
            normalize=config["norm_topk_prob"],
            scaling=config["routed_scaling_factor"],
            n_expert_groups=config["n_group"],
            topk_expert_groups=config["topk_group"],
            group_scores="top2",
        )
        shared_size = config["n_shared_experts"] * config["moe_intermediate_size"]
        options = {"router": router, "router_bias": True, "shared_size": shared_size}
    elif model == "gpt_oss":
        layout, n_experts, expert_size = GPT_OSS, "num_local_experts", "intermediate_size"
        options = {"logit_bias": True, "expert_bias": True, "interleaved": True}
        options["clamp"] = 1.702, config["swiglu_limit"]
    else:
        raise ValueError(
            "model_type must be qwen3_moe, mixtral, deepseek_v3 or gpt_oss; got "
            f"{model!r}. For others, use a Layout of your own."
        )
    sizes = {"n_experts": n_experts, "top_k": "num_experts_per_tok", "hidden_size": "hidden_size"}
    options["expert_size"] = config[expert_size]
    return layout, {name: config[key] for name, key in sizes.items()}, options
