"""Checks of what `MoE` is made of and called with."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P

from jax_ep.config import check_count
from jax_ep.exchange.checks import advise, check_flags, is_code, is_finite
from jax_ep.formats import BlockwiseFP8, Plain
from jax_ep.formats.base import check_is_array
from jax_ep.formats.plain import as_dtype
from jax_ep.group import EPGroup
from jax_ep.nnx.token_axes import Axes, are_different_axes, as_tuple, axes_of, count_shards
from jax_ep.router import RouterConfig


def check_router(
    group: EPGroup, given: RouterConfig | None, n_experts: int, router_bias: bool
) -> RouterConfig:
    """The given router, or the default one, which must fit the experts."""
    router = RouterConfig() if given is None else given
    if not isinstance(router, RouterConfig):
        raise TypeError(
            f"router must be a RouterConfig or None; got {router!r}. A router of your own is "
            "router_fn."
        )
    router.check(n_experts, group.config.top_k)
    if router_bias and group.config.top_k == n_experts:
        raise ValueError(
            f"router_bias must be False with top_k=n_experts={n_experts}: it only selects experts, "
            "and every token chooses all of them; got True. For a bias with a gradient, set "
            "logit_bias=True."
        )
    return router


def check_top_k(group: EPGroup, top_k: int) -> None:
    """Requires a group with as many choices as the layer."""
    if group.config.top_k != top_k:
        raise ValueError(
            f"{_name(group)}: the group must have the layer's top_k={top_k}; got "
            f"{group.config.top_k}. To choose another number of experts on purpose, set "
            f"layer.top_k = {group.config.top_k}."
        )


def check_weights_on_input(group: EPGroup, weights_on_input: bool) -> None:
    """Requires one weight per token, and no other rows than those of choices."""
    config = group.config
    if weights_on_input and (config.top_k > 1 or config.fused_shared_expert):
        raise ValueError(
            f"{_name(group)}: weights_on_input needs top_k=1, so that a token has one weight, and "
            f"no fused_shared_expert, which would get weighted tokens; got top_k={config.top_k}, "
            f"fused_shared_expert={config.fused_shared_expert}."
        )


def check_by_expert(group: EPGroup, state: Any, n_experts: int) -> None:
    """Requires variables of `expert_fn` that each expert has of its own."""
    for path, x in jax.tree.leaves_with_path(state):
        if x.shape[:1] != (n_experts,):
            raise ValueError(
                f"{_name(group)}: variables of expert_fn must have the shape [E={n_experts}, ...]; "
                f"got {x.shape} at {jax.tree_util.keystr(path)}."
            )


def check_rngs(rngs: Any) -> None:
    """Requires streams of random numbers."""
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(f"rngs must be an nnx.Rngs, such as nnx.Rngs(0); got {rngs!r}.")


def check_callable(name: str, given: Any) -> Any:
    """Requires a function or None."""
    if given is not None and not callable(given):
        raise TypeError(f"{name} must be a function or None; got {given!r}.")
    return given


def check_quantizable(layer: Any) -> None:
    """Requires experts that `MoE.quantize_experts` can replace by codes."""
    problems = {
        "the layer must have fp8_matmuls=True": layer.fp8_matmuls,
        "the layer must have no fsdp_axis": not layer.fsdp_axes,
        "the group must have no fused_shared_expert": not layer.group.config.fused_shared_expert,
        "the experts must not be codes already": layer.gate_up_scales is None,
    }
    for problem, is_met in problems.items():
        if not is_met:
            raise ValueError(f"nnx.MoE.quantize_experts: {problem}.")


def check_param_dtype(given: Any) -> None:
    """Requires a floating-point dtype that is not one of codes."""
    dtype = as_dtype(given)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or is_code(dtype):
        got = repr(given) if dtype is None else dtype.name
        raise ValueError(
            "param_dtype must be a floating-point dtype of 16 bits or more, such as jnp.float32; "
            f"got {got}."
        )


def check_factor(factor: Any) -> float | None:
    """`capacity_factor` as a float that prints like it."""
    if factor is None:
        return None
    if not is_finite(factor) or factor <= 0:
        raise ValueError(
            f"capacity_factor must be a number, positive and finite, or None; got {factor!r}."
        )
    return float(str(factor))  # np.float32(1.1) is 1.1 to the user


def check_fsdp_axes(group: EPGroup, token_spec: P, given: Axes) -> tuple[str, ...]:
    """The axes that experts' parameters are sharded over along H; none if not given."""
    axes, token_axes, hidden_size = as_tuple(given), axes_of(token_spec), group.config.hidden_size
    allowed = [name for name in token_axes if name not in group.geometry.axis_names]
    if not are_different_axes(axes, allowed):
        raise ValueError(
            "fsdp_axis must be one or several different axes that tokens are sharded over, and not "
            f"the group's; got {axes}, tokens are sharded over {token_axes}, the group has "
            f"{group.geometry.axis_names}."
        )
    n_shards = count_shards(group, axes)
    if hidden_size % n_shards:
        raise ValueError(
            f"fsdp_axis must have a size that divides hidden_size={hidden_size}; got {axes}, of "
            f"size {n_shards}."
        )
    return axes


def check_capacity_axes(token_spec: P, given: Axes) -> tuple[str, ...]:
    """The axes over whose ranks a capacity counts; none if not given."""
    axes, token_axes = as_tuple(given), axes_of(token_spec)
    if not are_different_axes(axes, token_axes):
        raise ValueError(
            "capacity_axis must be one or several different axes that tokens are sharded over; got "
            f"{axes}, tokens are sharded over {token_axes}."
        )
    return axes


def check_has_factor(factor: float | None, capacity_axes: tuple[str, ...], on_limit: str) -> None:
    """Requires a `capacity_factor` if other arguments say what it counts, or what it does."""
    if factor is None and (capacity_axes or on_limit == "raise"):
        given = f"capacity_axis={capacity_axes}" if capacity_axes else f"on_limit={on_limit!r}"
        raise ValueError(
            'capacity_factor must be given with capacity_axis or on_limit="raise": without it, '
            f"choices have no limit; got None, {given}. For rows beyond recv_capacity, set "
            'EPConfig(on_drop="raise").'
        )


def check_shared_size(group: EPGroup, given: int | None, expert_size: int) -> int:
    """Hidden size of the shared expert; 0 if there is none."""
    if not group.config.fused_shared_expert:
        return 0 if given in (None, 0) else check_count("shared_size", given)
    if given not in (None, expert_size):
        raise ValueError(
            "shared_size must be expert_size with fused_shared_expert; got "
            f"shared_size={given}, expert_size={expert_size}. Without fused_shared_expert, any "
            "size will do."
        )
    return expert_size


def check_fp8(fp8_matmuls: Any, fp8_gradients: Any) -> list[bool]:
    """Requires flags, and that gradients are in FP8 only if the matmuls are."""
    flags = check_flags("", fp8_matmuls=fp8_matmuls, fp8_gradients=fp8_gradients)
    if flags == [False, True]:
        raise ValueError("nnx.MoE: fp8_gradients needs fp8_matmuls=True; got False.")
    return flags


def check_formats(group: EPGroup, fp8_size: int | None) -> None:
    """Requires formats that the experts' matmuls take; `fp8_size`: F, if those are in FP8."""
    token_format, dtype = group.config.token_format, group.config.combine_dtype
    name = _name(group)
    if isinstance(token_format, Plain) and token_format.row_dtype != dtype:
        raise ValueError(
            f"{name}: experts multiply in combine_dtype={dtype.name}, but token_format carries "
            f"{token_format.row_dtype.name}. Change one of them: token_format=Plain({dtype.name}), "
            f"or combine_dtype={token_format.row_dtype.name}."
        )
    if fp8_size is None:
        return
    if dtype != jnp.bfloat16:
        raise ValueError(
            f"{name}: fp8_matmuls needs combine_dtype=bfloat16, the dtype of their results; got "
            f"{dtype.name}."
        )
    if not isinstance(token_format, BlockwiseFP8) or fp8_size % token_format.block_size:
        raise ValueError(
            f"{name}: fp8_matmuls needs the token_format BlockwiseFP8 and an expert_size "
            f"that is a multiple of {BlockwiseFP8.block_size}; got {token_format.name} and "
            f"expert_size={fp8_size}."
        )


def check_outside_shard_map() -> None:
    """Requires a call on arrays of the whole mesh."""
    manual_axes = jax.sharding.get_abstract_mesh().manual_axes
    if manual_axes:
        raise ValueError(
            "nnx.MoE must be called outside of jax.shard_map, with arrays of the whole mesh: it "
            f"calls jax.shard_map itself; manual axes here: {tuple(manual_axes)}. Inside, call "
            "what the layer consists of: jax_ep.router.route, jax_ep.dispatch, jax_ep.expert_mlp "
            "and jax_ep.combine."
        )


def check_fused_size(group: EPGroup, expert_size: int, shared_size: int | None) -> None:
    """Requires a shared expert that a group with `fused_shared_expert` can process."""
    if shared_size != expert_size:
        raise ValueError(
            f"{_name(group)}: a group with fused_shared_expert needs a shared expert of "
            f"expert_size={expert_size}; the layer has shared_size={shared_size}. Make the layer "
            "with that shared_size, or the group without fused_shared_expert."
        )


def check_tokens(group: EPGroup, tokens: Any) -> None:
    """Requires floating-point numbers `[..., H]`."""
    hidden_size = group.config.hidden_size
    check_is_array(_name(group), "tokens", tokens)
    if tokens.ndim < 2 or tokens.shape[-1] != hidden_size:
        raise ValueError(
            f"{_name(group)}: tokens must have the shape [..., H={hidden_size}], with at least one "
            f"dimension before H; got {tokens.shape}."
        )
    if not jnp.issubdtype(tokens.dtype, jnp.floating) or is_code(tokens.dtype):
        raise ValueError(
            f"{_name(group)}: tokens must be floating-point numbers; got {tokens.dtype.name}."
            f"{advise(tokens.dtype, jnp.floating)}"
        )


def check_mask(group: EPGroup, mask: Any, shape: tuple[int, ...]) -> None:
    """Requires `bool`, one for each token."""
    check_is_array(_name(group), "mask", mask)
    if mask.shape != shape:
        raise ValueError(
            f"{_name(group)}: mask must have the shape of tokens without their last dimension, "
            f"{shape}; got {mask.shape}."
        )
    if mask.dtype != jnp.bool_:
        raise ValueError(
            f"{_name(group)}: mask must be bool; got {mask.dtype.name}. Pass mask.astype(bool)."
        )


def _name(group: EPGroup) -> str:
    return group.geometry.call("nnx.MoE")
