"""The router of an MoE layer: logits to the experts of each token, with their weights.

Plain functions of JAX arrays, for any framework; nothing here needs a group. E experts, K = top_k;
`[..., E]` is `[T, E]`, or has more leading dimensions, such as `[B, S, E]`.

Experts' loads are balanced by `balance_loss`, a term of the training loss, or by a bias that only
selects and that `update_bias` moves after each step.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.config import check_count as _check_count  # public names are documented
from jax_ep.exchange import checks
from jax_ep.exchange.choices import count_choices
from jax_ep.formats.base import CheckedDataclass as _CheckedDataclass

_SCORES = ("softmax", "sigmoid")
_GROUP_SCORES = ("max", "top2")
_LEAST = 2.0**-30  # least sum of scores that scores are divided by as they are


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig(_CheckedDataclass):
    """How scores become choices and weights; frozen and hashable.

    docs/layers.md lists what well-known models set.

    Attributes:
        scores: `"softmax"` over all experts, which is 1 if there is one expert; or `"sigmoid"` of
            each logit.
        normalize: whether the weights of a token's K choices are divided by their sum. None: if
            K > 1. With K = 1, the only weight would be 1, and no gradient would reach the router.
        scaling: factor of all weights, after that division; not 0.
        n_expert_groups: number of groups of equal size that consecutive experts form. 1: no groups.
        topk_expert_groups: number of groups that a token may choose experts from: those with the
            highest group scores. With `n_expert_groups`, groups restrict nothing.
        group_scores: the score of a group: `"max"`, its highest score (DeepSeek-V2,
            https://arxiv.org/abs/2405.04434, section 2.2.2), or `"top2"`, the sum of its two
            highest (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.1.2). With a bias,
            scores include it here. With one group, of no effect.

    Raises:
        ValueError: a value is out of range. At construction.
    """

    scores: str = "softmax"
    normalize: bool | None = None
    scaling: float = 1.0
    n_expert_groups: int = 1
    topk_expert_groups: int = 1
    group_scores: str = "max"

    def __post_init__(self) -> None:
        for name, allowed in (("scores", _SCORES), ("group_scores", _GROUP_SCORES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}; got {getattr(self, name)!r}.")
        if self.normalize is not None:
            (normalize,) = checks.check_flags("", normalize=self.normalize)
            object.__setattr__(self, "normalize", normalize)
        if not _is_factor(self.scaling):
            raise ValueError(
                f"scaling must be a finite number, and not 0 in float32; got {self.scaling!r}."
            )
        for name in ("n_expert_groups", "topk_expert_groups"):
            _check_count(name, getattr(self, name))
        if not 1 <= self.topk_expert_groups <= self.n_expert_groups:
            raise ValueError(
                "topk_expert_groups must be from 1 to n_expert_groups; got "
                f"topk_expert_groups={self.topk_expert_groups}, "
                f"n_expert_groups={self.n_expert_groups}."
            )

    def check(self, n_experts: int, top_k: int) -> None:
        """Raises ValueError if the config does not fit so many experts and choices."""
        top_k = _check_count("top_k", top_k)
        if self.normalize and top_k == 1:
            raise ValueError(
                "normalize must be None or False with top_k=1, so that the weight is the score of "
                "the chosen expert; got True, which makes it 1, and no gradient reaches the router."
            )
        n_groups = self.n_expert_groups
        if n_experts % n_groups:
            raise ValueError(
                f"n_experts must be a multiple of n_expert_groups; got n_experts={n_experts}, "
                f"n_expert_groups={n_groups}."
            )
        size = n_experts // n_groups
        if n_groups > 1 and self.group_scores == "top2" and size < 2:
            raise ValueError(
                f'group_scores="top2" needs groups of at least 2 experts; got {n_experts} experts '
                f"in {n_groups} groups."
            )
        n_candidates = size * self.topk_expert_groups
        if top_k > n_candidates:
            raise ValueError(
                f"top_k must be at most the number of experts in topk_expert_groups="
                f"{self.topk_expert_groups} groups, {n_candidates}; got top_k={top_k}."
            )

    def normalizes(self, top_k: int) -> bool:
        """Whether weights are divided by their sum: `normalize`, or its default for `top_k`."""
        return top_k > 1 if self.normalize is None else self.normalize


class Routes(NamedTuple):
    """Where tokens go: the result of `route`, or of a router of your own (`nnx.MoE`).

    Attributes:
        topk_ids: `int32[..., K]`; from `route`, different experts in descending order of s + b, or
            of logits if there is no bias; of equal ones, the lower id comes first.
        topk_weights: `float32[..., K]`, for `dispatch` or `combine`; None for sums without weights.
        scores: `float32[..., E]`, of all experts, without bias; for `balance_loss`, or None.
        logits: `float32[..., E]`, for `z_loss`, or None.
    """

    topk_ids: jax.Array
    topk_weights: jax.Array | None
    scores: jax.Array | None = None
    logits: jax.Array | None = None


def route(
    config: RouterConfig, logits: jax.Array, top_k: int, bias: jax.Array | None = None
) -> Routes:
    """Chooses the `top_k` experts of each token.

    With scores s and bias b, a token chooses the experts with the highest s + b, a float32 sum.
    Without a bias, these are the experts with the highest logits, which differ where scores round
    to the same number, as those of a sigmoid do above a logit of 17. The weights are the s of these
    experts, divided by their sum if `config.normalizes(K)`, also where s underflows, times
    `config.scaling`. Differentiable in `logits` through weights and scores; no gradient flows into
    `bias`.

    Args:
        config: the kind of router.
        logits: `[..., E]`, of any floating-point dtype; computed in float32. Minus infinity gives
            an expert score and weight 0; a softmax needs a finite logit. To compute logits in
            float32, ask for `jax.lax.Precision.HIGHEST` in the matmul: JAX's default on GPUs is
            TF32, with 10 bits of mantissa.
        top_k: experts per token (K).
        bias: `float32[E]`, or None: see `update_bias`.

    Raises:
        TypeError: `config` is not a `RouterConfig`. While tracing.
        ValueError: the config does not fit E and K, or a shape or dtype does not fit. While
            tracing.
    """
    if not isinstance(config, RouterConfig):
        raise TypeError(f"route: config must be a RouterConfig; got {config!r}.")
    logits = _by_expert("route", "logits", logits)
    if bias is not None:
        (bias,) = checks.as_arrays("route", bias=bias)
        checks.check_array("route", "bias", bias, logits.shape[-1:], "E", jnp.floating)
    config.check(logits.shape[-1], top_k)
    logits = logits.astype(jnp.float32)
    scores = jax.nn.softmax(logits) if config.scores == "softmax" else jax.nn.sigmoid(logits)
    if bias is None:
        ranking = jnp.where(logits == 0, 0, logits)  # top_k takes +0 for more than -0
    else:
        ranking = scores + jnp.broadcast_to(bias, scores.shape)
    ranking = lax.stop_gradient(ranking)
    if config.n_expert_groups > 1:
        ranking = _mask_groups(config, ranking, of_logits=bias is None)
    _, topk_ids = lax.top_k(ranking, top_k)
    weights = jnp.take_along_axis(scores, topk_ids, axis=-1)
    if config.normalizes(top_k):
        chosen = jnp.take_along_axis(logits, topk_ids, axis=-1)
        weights = _normalize(weights, _log_scores(config, chosen))
    return Routes(topk_ids, weights * config.scaling, scores, logits)


def _mask_groups(config: RouterConfig, ranking: jax.Array, of_logits: bool) -> jax.Array:
    """Minus infinity for experts outside of the token's best groups, and for no others."""
    grouped = ranking.reshape(*ranking.shape[:-1], config.n_expert_groups, -1)
    if config.group_scores == "max":
        group_scores = grouped.max(axis=-1)
    else:
        best, _ = lax.top_k(grouped, 2)
        group_scores = _rank_sums(config, best) if of_logits else best.sum(axis=-1)
    _, chosen = lax.top_k(group_scores, config.topk_expert_groups)
    is_chosen = jax.nn.one_hot(chosen, config.n_expert_groups, dtype=bool).any(axis=-2)
    grouped = jnp.maximum(grouped, jnp.finfo(grouped.dtype).min)
    return jnp.where(is_chosen[..., None], grouped, -jnp.inf).reshape(ranking.shape)


def _rank_sums(config: RouterConfig, logits: jax.Array) -> jax.Array:
    """Numbers in the order of the scores' sums over axis -1, also if scores round to 0 or 1."""
    log_sum = jax.nn.logsumexp(_log_scores(config, logits), axis=-1)
    if config.scores == "softmax":
        return log_sum
    return log_sum - jax.nn.logsumexp(_log_scores(config, -logits), axis=-1)  # of 1 - s


def _log_scores(config: RouterConfig, logits: jax.Array) -> jax.Array:
    """Logarithms of the scores, up to a term per token."""
    return logits if config.scores == "softmax" else jax.nn.log_sigmoid(logits)


def _normalize(scores: jax.Array, log_scores: jax.Array) -> jax.Array:
    """Scores divided by their sum over axis -1; all zero if the scores are, not by underflow."""
    total = scores.sum(axis=-1, keepdims=True)
    exact = jax.nn.softmax(log_scores, where=log_scores != -jnp.inf)
    return jnp.where(total > _LEAST, scores / jnp.maximum(total, _LEAST), exact)


def expert_load(topk_ids: jax.Array, n_experts: int, axis_name: Any = ()) -> jax.Array:
    """`int32[E]`, how often each expert was chosen; ids outside `[0, E)` do not count.

    Args:
        topk_ids: `int32[..., K]`.
        n_experts: E.
        axis_name: inside `jax.shard_map`, the mesh axes that tokens are sharded over; all shards
            get the load by all tokens.

    Raises:
        ValueError: `topk_ids` are not integers. While tracing.
    """
    topk_ids = _ids("expert_load", topk_ids)
    return lax.psum(count_choices(topk_ids, n_experts), axis_name)


def balance_loss(
    scores: jax.Array,
    topk_ids: jax.Array,
    *,
    per_sequence: bool = False,
    axis_name: Any = (),
    sequence_axis_name: Any = (),
) -> jax.Array:
    """`float32[]`, E · Σ over experts i of f_i · P_i; 1 if all experts get the same share.

    f_i is the fraction of the choices that name expert i, P_i the mean over tokens of i's share of
    the token's scores. Only P_i has a gradient. Add the loss to the model's, times a small factor.

    Source: Switch Transformer, https://arxiv.org/abs/2101.03961, section 2.2, for K = 1. With K
    choices it is the expert-level loss of DeepSeek-V2, https://arxiv.org/abs/2405.04434, section
    2.2.3; with `per_sequence`, the sequence-wise loss of DeepSeek-V3,
    https://arxiv.org/abs/2412.19437, section 2.1.2. GShard's, https://arxiv.org/abs/2006.16668,
    algorithm 1, counts first choices only and is smaller by a factor of E².

    Args:
        scores: `float32[..., E]`, from `route`. Sigmoid scores are divided by their sum over E;
            tokens whose scores all underflow have the share 0 of every expert.
        topk_ids: `int32[..., K]`, from `route`. Tokens without a choice (all ids negative), such as
            padding, do not count, whatever their scores are, NaN included.
        per_sequence: takes axis -2 for the tokens of a sequence and returns the mean of the losses
            of the sequences that have tokens. Otherwise all tokens are one batch. Without tokens,
            the loss is 0.
        axis_name: inside `jax.shard_map`, the mesh axes that tokens are sharded over; all shards
            get the loss of all tokens.
        sequence_axis_name: the axes of `axis_name` that sequences are sharded over, along axis -2;
            for `per_sequence`. With (), each shard must hold whole sequences.

    Raises:
        ValueError: a shape or dtype does not fit. While tracing.
    """
    scores = _by_expert("balance_loss", "scores", scores, 2 if per_sequence else 1)
    topk_ids = _ids("balance_loss", topk_ids, scores.shape[:-1])
    n_experts, top_k = scores.shape[-1], topk_ids.shape[-1]
    add_up = functools.partial(_add_up, n_experts)
    if per_sequence:
        add_up = jax.vmap(add_up)
    shape = (math.prod(scores.shape[:-2]), scores.shape[-2]) if per_sequence else (-1,)
    sums = add_up(scores.reshape(*shape, n_experts), topk_ids.reshape(*shape, top_k))
    chosen, share, n_tokens = lax.psum(sums, sequence_axis_name if per_sequence else axis_name)
    n_least = jnp.maximum(n_tokens, 1).astype(jnp.float32)[..., None]
    losses = n_experts * (chosen / (n_least * top_k) * share / n_least).sum(axis=-1)
    if not per_sequence:
        return losses
    sharded = _axes(sequence_axis_name)
    both = jnp.stack([losses.sum(), (n_tokens > 0).sum().astype(jnp.float32)])
    total, n_real = lax.psum(both, tuple(x for x in _axes(axis_name) if x not in sharded))
    return total / jnp.maximum(n_real, 1)


def _add_up(
    n_experts: int, scores: jax.Array, topk_ids: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Choices and shares of each expert, `float32[E]`, and the number of tokens, of `[T, E]`."""
    is_token = (topk_ids >= 0).any(axis=-1, keepdims=True)
    shares = _shares(jnp.where(is_token, scores.astype(jnp.float32), 0))
    chosen = count_choices(topk_ids, n_experts).astype(jnp.float32)
    return chosen, shares.sum(axis=0), is_token.sum()


def _shares(scores: jax.Array) -> jax.Array:
    """Scores divided by their sum over axis -1; with small sums, times a power of two before.

    The derivative of a quotient has the square of the sum, which would underflow.
    """
    total = scores.sum(axis=-1, keepdims=True)
    factor = jnp.where(total < _LEAST, 2.0**90, 1.0)
    return scores * factor / jnp.maximum(total * factor, _LEAST)


def z_loss(
    logits: jax.Array, topk_ids: jax.Array | None = None, *, axis_name: Any = ()
) -> jax.Array:
    """`float32[]`, the mean over tokens of logsumexp(logits)²; keeps logits small, and thus exact.

    Add it to the model's loss, times a small factor: 1e-3 in the source.

    Source: the router z-loss of ST-MoE, https://arxiv.org/abs/2202.08906, section 3.3, equation 5.

    Args:
        logits: `[..., E]`, as given to `route`, of any floating-point dtype; computed in float32.
        topk_ids: as for `balance_loss`; None: all tokens count.
        axis_name: as for `balance_loss`.

    Raises:
        ValueError: a shape or dtype does not fit. While tracing.
    """
    logits = _by_expert("z_loss", "logits", logits)
    if topk_ids is not None:
        topk_ids = _ids("z_loss", topk_ids, logits.shape[:-1])
    shape = logits.shape[:-1]
    is_token = jnp.ones(shape, bool) if topk_ids is None else (topk_ids >= 0).any(axis=-1)
    logits = jnp.where(is_token[..., None], logits.astype(jnp.float32), 0)
    squares = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    sums = jnp.where(is_token, squares, 0).sum(), is_token.sum().astype(jnp.float32)
    total, n_tokens = lax.psum(sums, axis_name)
    return total / jnp.maximum(n_tokens, 1)


def update_bias(bias: jax.Array, load: jax.Array, rate: float = 1e-3) -> jax.Array:
    """`float32[..., E]`, the bias for the next step: b + rate · sign(mean(load) - load).

    Experts that were chosen more often than the mean get a lower bias, the others a higher one. The
    load must be that of all tokens of the step, on all devices. Integers are compared exactly.

    Source: auxiliary-loss-free balancing, https://arxiv.org/abs/2408.15664, algorithm 1, as in
    DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.1.2.

    Args:
        bias: `float32[..., E]`; leading dimensions may be layers.
        load: `[..., E]`, in the shape of the bias, from `expert_load`: integers, 0 or more, or
            floating-point numbers, whose differences are compared in float32.
        rate: the step, 1e-3 in DeepSeek-V3.

    Raises:
        ValueError: a shape or dtype does not fit. While tracing.
    """
    bias = _by_expert("update_bias", "bias", bias)
    (load,) = checks.as_arrays("update_bias", load=load)
    letters = "E" if bias.ndim == 1 else "layers E"
    checks.check_array("update_bias", "load", load, bias.shape, letters, jnp.integer, jnp.floating)
    if jnp.issubdtype(load.dtype, jnp.integer):
        return bias + rate * _compare_with_mean(load)
    above = (load - load[..., :1]).astype(jnp.float32)  # of close numbers, exact
    return bias + rate * jnp.sign(above.mean(axis=-1, keepdims=True) - above)


def _is_factor(value: Any) -> bool:
    """Whether a product with it in float32 is neither always 0 nor always infinite."""
    limits = jnp.finfo(jnp.float32)
    return checks.is_finite(value) and limits.tiny.item() <= abs(value) <= limits.max.item()


def _compare_with_mean(load: Any) -> jax.Array:
    """`float32[..., E]`, sign(mean(load) - load), exact for E up to 65536: no sum overflows."""
    if load.dtype.itemsize < 8:  # NumPy's integers of 64 bits stay NumPy's
        load = load.astype(jnp.uint32)
    n_experts = load.shape[-1]
    rest = (load % n_experts).sum(axis=-1, keepdims=True, dtype=load.dtype)
    mean = (load // n_experts).sum(axis=-1, keepdims=True, dtype=load.dtype) + rest // n_experts
    is_below = (load < mean) | ((load == mean) & (rest % n_experts > 0))
    return jnp.asarray(is_below, jnp.float32) - jnp.asarray(load > mean, jnp.float32)


def _axes(axis_name: Any) -> tuple[Any, ...]:
    return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)


def _by_expert(operation: str, name: str, x: Any, least: int = 1) -> Any:
    """Floating-point numbers `[..., E]` or, with `least` = 2, `[..., S, E]`, checked."""
    (x,) = checks.as_arrays(operation, **{name: x})
    n_dims = max(least, 0 if x is None else x.ndim)
    checks.check_array(
        operation, name, x, (None,) * n_dims, "S E" if least == 2 else "E", jnp.floating
    )
    return x


def _ids(operation: str, topk_ids: Any, leading: tuple[int, ...] | None = None) -> Any:
    """Integers `[..., K]`, checked; with `leading`, of these leading dimensions."""
    (ids,) = checks.as_arrays(operation, topk_ids=topk_ids)
    unknown = (None,) * max(0, 0 if ids is None else ids.ndim - 1)
    shape = (*(unknown if leading is None else leading), None)
    checks.check_array(operation, "topk_ids", ids, shape, "K", jnp.integer)
    return ids
