"""Sizes of models, what they count, and the floating-point operations of training."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a transformer whose feed-forward layers are all MoE, with untied embeddings."""

    vocabulary: int
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_size: int
    n_experts: int
    top_k: int
    expert_size: int
    rope_theta: float

    @property
    def attention_size(self) -> int:
        """Elements of all query heads of a token."""
        return self.n_heads * self.head_size

    @property
    def n_params(self) -> int:
        """All parameters."""
        expert = 3 * self.hidden_size * self.expert_size
        norms = (2 * self.n_layers + 1) * self.hidden_size + 2 * self.n_layers * self.head_size
        n_idle = self.n_layers * (self.n_experts - self.top_k) * expert
        return self.n_multiplied + n_idle + norms + self.vocabulary * self.hidden_size

    @property
    def n_multiplied(self) -> int:
        """Parameters of the matrices that a token is multiplied with: no embedding table, no norms.

        Of the experts, these are `top_k` per layer.
        """
        kv_size = self.n_kv_heads * self.head_size
        attention = self.hidden_size * (2 * self.attention_size + 2 * kv_size)
        experts = self.hidden_size * (3 * self.top_k * self.expert_size + self.n_experts)
        return self.n_layers * (attention + experts) + self.hidden_size * self.vocabulary

    def flops_per_token(self, sequence: int) -> float:
        """Operations of a training step per token, forward and backward.

        6 per parameter that the token is multiplied with, and causal attention: 12 · L · heads ·
        head size · S, halved, because a token sees half of its sequence on average. What is
        computed twice (`--remat`) counts once.
        """
        return 6 * (self.n_multiplied + self.n_layers * self.attention_size * sequence)


# https://huggingface.co/Qwen/Qwen3-30B-A3B: norm_topk_prob, as in jax_ep's default router.
QWEN3_30B_A3B = Sizes(
    vocabulary=151936,
    hidden_size=2048,
    n_layers=48,
    n_heads=32,
    n_kv_heads=4,
    head_size=128,
    n_experts=128,
    top_k=8,
    expert_size=768,
    rope_theta=1e6,
)
TINY = Sizes(
    vocabulary=256,
    hidden_size=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_size=16,
    n_experts=16,
    top_k=4,
    expert_size=32,
    rope_theta=1e4,
)
