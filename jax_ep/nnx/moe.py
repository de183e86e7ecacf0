"""MoE: a Flax NNX module of a Mixture-of-Experts layer with its experts spread over a group."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import P

from jax_ep.formats import BlockwiseFP8, Plain
from jax_ep.fused_silu import check_activation
from jax_ep.group import EPGroup
from jax_ep.nnx.forward import Forward, MoEReport
from jax_ep.router import RouterConfig, update_bias

# Parameters by the dtype that a call uses them in: float32, and that of the experts' matmuls.
_ROUTER = ("router", "logit_bias")
_EXPERTS = ("gate_up", "down", "gate_up_bias", "down_bias", "shared_gate_up", "shared_down")

Axes = str | tuple[str, ...] | None


class RouterBias(nnx.Variable):
    """The bias that only selects experts: state, not a parameter, so no gradient changes it."""


class MoE(nnx.Module):
    """Router, then the chosen experts, then the weighted sum of their results.

    Each expert is `(silu(x @ gate) * (x @ up)) @ down`, with biases and another activation on
    request. The parameters carry sharding metadata: the experts' are sharded along the group's
    axis, the others replicated. They are created on the group's mesh, each shard on its device if
    the module is created under `jax.jit` or `nnx.jit`.

    E experts, K choices and the hidden size H are those of `group.config`.

    Attributes:
        router: `nnx.Param`, `[H, E]`.
        logit_bias: `nnx.Param`, `[E]`, or None.
        gate_up: `nnx.Param`, `[E, H, 2 F]`, all gate columns first unless `interleaved`.
        down: `nnx.Param`, `[E, F, H]`.
        gate_up_bias: `nnx.Param`, `[E, 2 F]`, or None.
        down_bias: `nnx.Param`, `[E, H]`, or None.
        shared_gate_up: `nnx.Param`, `[H, 2 S]`, of the shared expert, or None.
        shared_down: `nnx.Param`, `[S, H]`, or None.
        router_bias: `RouterBias`, `float32[E]`, or None.
        group: the group that calls use. Assign another one, with equal experts, to run the same
            parameters with another bound on tokens, such as in inference.
    """

    def __init__(
        self,
        group: EPGroup,
        expert_size: int,
        *,
        router: RouterConfig | None = None,
        router_bias: bool = False,
        logit_bias: bool = False,
        expert_bias: bool = False,
        interleaved: bool = False,
        clamp: tuple[float, float] | None = None,
        balance_per_sequence: bool = False,
        capacity_factor: float | None = None,
        shared_size: int | None = None,
        token_axes: Axes = None,
        fsdp_axis: Axes = None,
        fp8_matmuls: bool = False,
        kernel_init: nnx.Initializer | None = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        """Creates the parameters.

        Args:
            group: from `ep_init`.
            expert_size: hidden size of an expert (F).
            router: the kind of router; None is `RouterConfig()`.
            router_bias: whether there is a bias for selection, zero at first; call `update_bias`
                after each step.
            logit_bias: whether the router's logits have a trainable bias, zero at first.
            expert_bias: whether both matmuls of the routed experts have biases, zero at first.
            interleaved: whether gate and up columns alternate, as in `jax_ep.expert_mlp`; of the
                shared expert, too.
            clamp: `(alpha, limit)` of the clamped activation, as in `jax_ep.expert_mlp`; of the
                shared expert, too.
            balance_per_sequence: see `jax_ep.router.balance_loss`.
            capacity_factor: limits each expert to so many times its even share of the choices of
                each rank's T tokens: `ceil(factor * T * K / E)` choices, padding included in T.
                Those of later tokens are dropped (`jax_ep.limit_choices`): they add nothing to the
                output. None: no limit.
            shared_size: hidden size of a shared expert (S), which processes every token; None: no
                shared expert, or with `config.fused_shared_expert`, one of `expert_size`.
            token_axes: the mesh axis, or a tuple of axes, that the first dimension of the tokens is
                sharded over; None: all axes of the mesh, or with `config.skip_a2a`, all but the
                group's. Along axes left out, all devices do the same work.
            fsdp_axis: a mesh axis, or a tuple of axes, that the experts' matrices are sharded over
                in addition, along H. They are gathered for each use, in the dtype of the
                matmuls, and their gradients reduce-scattered. Of `token_axes`, not the group's.
            fp8_matmuls: whether experts multiply in FP8; needs the token format `BlockwiseFP8`.
            kernel_init: initializer of every matrix `[n_in, n_out]`; None is `lecun_normal`.
            param_dtype: dtype of the parameters. Experts multiply in `config.combine_dtype`, the
                router in float32.
            rngs: the stream `params` is used.

        Raises:
            ValueError: the router does not fit the experts, `shared_size` not the fused shared
                expert, or axes not the group; or `capacity_factor`, `interleaved` or `clamp` are no
                values for them.
        """
        config, axis = group.config, group.axis_name
        self.group = group
        self.router_config = router or RouterConfig()
        self.router_config.check(config.n_experts, config.top_k)
        self.balance_per_sequence = balance_per_sequence
        self.capacity_factor = _check_factor(capacity_factor)
        self.token_axes = _token_axes(group, token_axes)
        self.fsdp_axes = _fsdp_axes(group, self.token_axes, fsdp_axis)
        self.fp8_matmuls = fp8_matmuls
        self.interleaved = interleaved
        self.clamp = check_activation("nnx.MoE", interleaved, clamp)
        _check_formats(group, expert_size if fp8_matmuls else None)
        init = _by_expert(kernel_init or nnx.initializers.lecun_normal())

        def param(shape: tuple[int, ...], *spec: Axes) -> nnx.Param:
            create = nnx.with_partitioning(init, spec, mesh=group.mesh)
            return nnx.Param(create(rngs.params(), shape, param_dtype))

        def bias(shape: tuple[int, ...], *spec: Axes) -> nnx.Param:
            create = nnx.with_partitioning(jnp.zeros, spec, mesh=group.mesh)
            return nnx.Param(create(shape, param_dtype))

        n_experts, size, fsdp = config.n_experts, config.hidden_size, self.fsdp_axes or None
        n_shared = _shared_size(group, shared_size, expert_size)
        self.router = param((size, n_experts), None, None)
        self.gate_up = param((n_experts, size, 2 * expert_size), axis, fsdp, None)
        self.down = param((n_experts, expert_size, size), axis, None, fsdp)
        self.shared_gate_up = param((size, 2 * n_shared), None, None) if n_shared else None
        self.shared_down = param((n_shared, size), None, None) if n_shared else None
        self.logit_bias = bias((n_experts,), None) if logit_bias else None
        self.gate_up_bias = bias((n_experts, 2 * expert_size), axis, None) if expert_bias else None
        self.down_bias = bias((n_experts, size), axis, None) if expert_bias else None
        self.router_bias = _zero_bias(group) if router_bias else None

    def __call__(
        self, tokens: jax.Array, mask: jax.Array | None = None
    ) -> tuple[jax.Array, MoEReport]:
        """Applies the layer; to arrays of the whole mesh, outside of `jax.shard_map`.

        Args:
            tokens: `[..., H]`, the first dimension a multiple of the number of shards that
                `token_axes` make; at most `max_tokens_per_rank` tokens in each. Converted to a
                dtype that the token format takes, if they have another.
            mask: `bool[...]`, False for tokens that are padding: they go to no routed expert and
                count for nothing in the report. None: all True.

        Returns:
            The output, in the shape and dtype of `tokens`, and the report.
        """
        group = self.group
        by_token: Any = P(self.token_axes)
        everywhere: Any = P()
        self._check_call(tokens, mask)
        forward = Forward(
            group=group,
            router=self.router_config,
            token_axes=self.token_axes,
            fsdp_axes=self.fsdp_axes,
            balance_per_sequence=self.balance_per_sequence,
            capacity_factor=self.capacity_factor,
            fp8_matmuls=self.fp8_matmuls,
            interleaved=self.interleaved,
            clamp=self.clamp,
        )
        weights = self._weights()
        specs = {name: P() for name in weights}
        specs["gate_up"] = P(group.axis_name, self.fsdp_axes or None)
        specs["down"] = P(group.axis_name, None, self.fsdp_axes or None)
        by_expert = {name: P(group.axis_name) for name in ("gate_up_bias", "down_bias")}
        specs |= {name: spec for name, spec in by_expert.items() if name in weights}
        report = MoEReport(*[everywhere] * len(MoEReport._fields))
        layer = jax.shard_map(
            forward,
            mesh=group.mesh,
            in_specs=(specs, by_token, by_token),
            out_specs=(by_token, report._replace(topk_ids=by_token)),
        )
        return layer(weights, tokens, mask)

    def update_bias(self, expert_load: jax.Array, rate: float = 1e-3) -> None:
        """Moves the bias towards equal loads: `jax_ep.router.update_bias`.

        Args:
            expert_load: `[E]`, that of the reports of a step, added up; `[n_layers, E]` for layers
                stacked by `nnx.vmap`.
            rate: how far.

        Raises:
            ValueError: the layer has no bias.
        """
        if self.router_bias is None:
            raise ValueError("update_bias: the layer must have a bias; create it with router_bias.")
        self.router_bias[...] = update_bias(self.router_bias[...], expert_load, rate)

    def _check_call(self, tokens: jax.Array, mask: jax.Array | None) -> None:
        """Requires tokens that the mesh's shards divide, and a group that the parameters fit."""
        mesh, config = self.group.mesh, self.group.config
        size = self.router.shape[0]
        if tokens.ndim < 2 or tokens.shape[-1] != size:
            raise ValueError(
                f"nnx.MoE: tokens must have the shape [..., H={size}], with at least one dimension "
                f"before H; got {tokens.shape}."
            )
        if mask is not None and mask.shape != tokens.shape[:-1]:
            raise ValueError(
                "nnx.MoE: mask must have the shape of tokens without their last dimension, "
                f"{tokens.shape[:-1]}; got {mask.shape}."
            )
        n_shards = math.prod(mesh.shape[name] for name in self.token_axes)
        if tokens.shape[0] % n_shards:
            raise ValueError(
                f"nnx.MoE: the first dimension of tokens must be a multiple of {n_shards}, the "
                f"shards along {self.token_axes}; got {tokens.shape}. Pad the tokens, with a mask "
                "that is False for the padding."
            )
        shape = config.hidden_size, config.n_experts
        if self.router.shape != shape:
            raise ValueError(
                f"nnx.MoE: the group must have the layer's experts: [H, E] = "
                f"{list(self.router.shape)}; got {list(shape)}."
            )
        _check_formats(self.group, self.down.shape[1] if self.fp8_matmuls else None)

    def _weights(self) -> dict[str, jax.Array]:
        """The arrays that a call uses, in the dtypes that it computes in."""
        dtypes = dict.fromkeys(_EXPERTS, self.group.config.combine_dtype)
        dtypes |= dict.fromkeys(_ROUTER, jnp.float32)
        params = {name: getattr(self, name) for name in dtypes}
        weights = {name: x[...].astype(dtypes[name]) for name, x in params.items() if x is not None}
        if self.router_bias is not None:
            weights["router_bias"] = self.router_bias[...]
        return weights


def _check_formats(group: EPGroup, fp8_size: int | None) -> None:
    """Requires formats that the experts' matmuls take; `fp8_size`: F, if those are in FP8."""
    token_format, dtype = group.config.token_format, group.config.combine_dtype
    if isinstance(token_format, Plain) and token_format.row_dtype != dtype:
        raise ValueError(
            f"nnx.MoE: experts multiply in combine_dtype={dtype.name}, but token_format carries "
            f"{token_format.row_dtype.name}. Change one of them: token_format=Plain({dtype.name}), "
            f"or combine_dtype={token_format.row_dtype.name}."
        )
    if fp8_size is None:
        return
    if dtype != jnp.bfloat16:
        raise ValueError(
            "nnx.MoE: fp8_matmuls needs combine_dtype=bfloat16, the dtype of their results; got "
            f"{dtype.name}."
        )
    if not isinstance(token_format, BlockwiseFP8) or fp8_size % token_format.block_size:
        raise ValueError(
            "nnx.MoE: fp8_matmuls needs the token_format BlockwiseFP8 and an expert_size that is a "
            f"multiple of {BlockwiseFP8.block_size}; got {token_format.name} and "
            f"expert_size={fp8_size}."
        )


def _check_factor(factor: Any) -> float | None:
    if factor is None:
        return None
    is_number = isinstance(factor, int | float | np.integer | np.floating)
    if not is_number or isinstance(factor, bool) or not 0 < factor < math.inf:
        raise ValueError(
            f"capacity_factor must be a number, positive and finite, or None; got {factor!r}."
        )
    return float(factor)


def _token_axes(group: EPGroup, given: Axes) -> tuple[str, ...]:
    """The axes that tokens are sharded over, checked."""
    own, skip = set(group.geometry.axis_names), group.config.skip_a2a
    if given is None:
        return tuple(name for name in group.mesh.axis_names if not (skip and name in own))
    axes = _as_tuple(given)
    fits = not own & set(axes) if skip else own <= set(axes)
    if not fits or not set(axes) <= set(group.mesh.axis_names):
        which = "none of the group's, because of skip_a2a" if skip else "all of the group's"
        raise ValueError(
            f"token_axes must be axes of the mesh, {which}; got {axes}, the group has "
            f"{group.geometry.axis_names}, the mesh {group.mesh.axis_names}."
        )
    return axes


def _fsdp_axes(group: EPGroup, token_axes: tuple[str, ...], given: Axes) -> tuple[str, ...]:
    """The axes that experts' parameters are sharded over along H, checked; none if not given."""
    axes = _as_tuple(given)
    if not set(axes) <= set(token_axes) - set(group.geometry.axis_names):
        raise ValueError(
            "fsdp_axis must be an axis that tokens are sharded over, and not the group's; got "
            f"{axes}, tokens are sharded over {token_axes}, the group has "
            f"{group.geometry.axis_names}."
        )
    return axes


def _as_tuple(axes: Axes) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _shared_size(group: EPGroup, given: int | None, expert_size: int) -> int:
    """Hidden size of the shared expert, checked; 0 if there is none."""
    if not group.config.fused_shared_expert:
        return given or 0
    if given not in (None, expert_size):
        raise ValueError(
            "shared_size must be expert_size with fused_shared_expert; got "
            f"shared_size={given}, expert_size={expert_size}. Without fused_shared_expert, any "
            "size will do."
        )
    return expert_size


def _by_expert(init: nnx.Initializer) -> Callable[..., jax.Array]:
    """Initializes each matrix of `[E, n_in, n_out]` by itself."""

    def create(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        if len(shape) == 2:
            return init(key, shape, dtype)
        keys = jax.random.split(key, shape[0])
        return jax.vmap(lambda key: init(key, shape[1:], dtype))(keys)

    return create


def _zero_bias(group: EPGroup) -> RouterBias:
    create = nnx.with_partitioning(jnp.zeros, (None,), mesh=group.mesh)
    return RouterBias(create(group.config.n_experts, jnp.float32))
