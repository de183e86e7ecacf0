"""MoE: a Flax NNX module of a Mixture-of-Experts layer with its experts spread over a group."""

import functools
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P

from jax_ep.config import check_count, check_on_drop
from jax_ep.exchange.checks import check_flags
from jax_ep.group import EPGroup, check_is_group
from jax_ep.layer.activation.api import check_activation
from jax_ep.layer.expert_mlp import expert_mlp
from jax_ep.nnx import checks
from jax_ep.nnx.forward import BY_EXPERT, Forward, router_logits
from jax_ep.nnx.own_router import call_router_fn, route_shards
from jax_ep.nnx.report import MoEReport, sow_losses
from jax_ep.nnx.state import (
    Parameters,
    Placement,
    RouterBias,
    hidden_axis,
    move_bias,
    quantize_experts,
)
from jax_ep.nnx.token_axes import Axes, check_sharded_alike, check_token_axes, spec_of_call
from jax_ep.placement.expert_placement import ExpertPlacement, check_placement
from jax_ep.router import RouterConfig, Routes

# Parameters by the dtype that a call uses them in: float32, and that of the experts' matmuls.
_ROUTER = ("router", "logit_bias")
_EXPERTS = ("gate_up", "down", "gate_up_bias", "down_bias", "shared_gate_up", "shared_down")


class MoE(nnx.Module):
    """Router, then the chosen experts, then the weighted sum of their results.

    Each expert is `(silu(x @ gate) * (x @ up)) @ down`, with biases and another activation on
    request. The parameters carry sharding metadata: the experts' are sharded along the group's
    axis, the others replicated. They are created on the group's mesh, each shard on its device if
    the module is created under `jax.jit` or `nnx.jit`.

    E experts, K choices and the hidden size H are those of `group.config`.

    Args:
        group: from `ep_init`.
        expert_size: hidden size of an expert (F).
        router: the kind of router; None is `RouterConfig()`.
        router_bias: whether there is a bias for selection, zero at first; call `update_bias`
            after each step, as nothing else changes it. Not with K = E, where it selects nothing.
        router_fn: what a call asks for routes, in place of `jax_ep.router.route` (None):
            `router_fn(layer, tokens, mask, **router_args)` to `Routes`, for tokens `[..., H]` of
            the whole mesh, outside of `jax.shard_map`; padding is zero, and its routes are ignored.
            A function, or an `nnx.Module` with parameters of its own. Losses that the routes lack
            arrays for are 0.
        weights_on_input: whether a token's weight multiplies the token, before it is sent, rather
            than the result of its expert (Llama 4). Only with K = 1, and not with
            `config.fused_shared_expert`.
        logit_bias: whether the router's logits have a trainable bias, zero at first.
        expert_bias: whether both matmuls of the routed experts have biases, zero at first.
        transposed: whether the experts' matrices, the shared expert's included, are
            `[n_out, n_in]`, as in checkpoints of PyTorch. The router's is `[H, E]` in any case.
        interleaved: as in `jax_ep.expert_mlp`; also for the shared expert.
        clamp: as in `jax_ep.expert_mlp`; also for the shared expert.
        balance_per_sequence: see `jax_ep.router.balance_loss`. Tokens `[T, H]` are one sequence.
        capacity_factor: limits each expert to so many times its even share of the choices of each
            rank's T tokens: `ceil(factor * T * K / E)` choices, padding included in T; the product
            is exact, with the factor as it is printed. Later tokens' choices beyond that
            are dropped (`jax_ep.limit_choices`): they add nothing to the output. From E / K on,
            nothing is dropped. None: no limit.
        capacity_axis: a mesh axis, or a tuple of axes, out of `token_axes`, over whose ranks
            `capacity_factor` counts: T is then the number of their tokens together, and choices on
            later ranks are dropped first. None: each rank counts its own.
        on_limit: `"count"`: the report says how many choices were dropped. `"raise"`: if any was
            dropped, the call fails; needs a `capacity_factor`, as `capacity_axis` does. For rows
            beyond `recv_capacity`, see `EPConfig.on_drop`.
        shared_size: hidden size of a shared expert (S), which processes every token. None: no
            shared expert, or with `config.fused_shared_expert`, one of `expert_size`. 0: none.
        token_axes: the mesh axis, or a tuple of axes, that the first dimension of the tokens is
            sharded over; or a `jax.P` with the axes of each dimension before H, such as
            `jax.P("data", "expert")` for `[B, S, H]`. The group's axes must be among them, unless
            `config.skip_a2a`; then none may be. Along axes left out, all devices do the same work.
            None: all axes of the mesh, or with `config.skip_a2a`, all but the group's; on a mesh
            with explicit axes, those that the tokens of each call are sharded over.
        fsdp_axis: a mesh axis, or a tuple of axes, that the experts' matrices are sharded over in
            addition, along H; out of `token_axes`, but not the group's. The matrices are gathered
            for each use, in the dtype of the matmuls, and their gradients reduce-scattered.
        fp8_matmuls: whether experts multiply in FP8; needs the token format `BlockwiseFP8`.
            Each call quantizes the weights, unless `quantize_experts` has done it once.
        fp8_gradients: whether the backward of experts' matmuls is in FP8, too, rather than in
            bfloat16 (`quantize_weights`); needs `fp8_matmuls`.
        expert_fn: what a rank calls in place of `jax_ep.expert_mlp` (None), with the same
            arguments: `(dispatched, gate_up, down, *, gate_up_bias, down_bias, interleaved,
            clamp)` to the results `[C, H]`, inside `jax.shard_map`. Also `transposed=True` if the
            layer is and the weights are arrays. A function, or an `nnx.Module` whose variables are
            `[E, ...]`; each rank calls it with those of its experts, `[L, ...]`.
        placement: of logical experts on the physical experts of the group, of which there are
            `config.n_experts`; E is then the number of logical experts. `layer.placement.set()`
            replaces it between steps (docs/balance.md). None: every expert is one physical expert.
        kernel_init: initializer of every matrix `[n_in, n_out]`, transposed or not; None is
            `lecun_normal`.
        param_dtype: dtype of the parameters, of 16 bits or more. Experts multiply in
            `config.combine_dtype`, the router in float32.
        rngs: the stream `params` is used.

    Raises:
        TypeError: `group`, `router`, `router_fn`, `expert_fn`, `kernel_init` or `rngs` has another
            type.
        ValueError: the router does not fit the experts, `shared_size` does not fit the fused shared
            expert, the axes do not fit the group, or another argument is invalid.

    Attributes:
        router: `nnx.Param`, `[H, E]`.
        logit_bias: `nnx.Param`, `[E]`, or None.
        gate_up: `nnx.Param`, `[E, H, 2 F]`, all gate columns first unless `interleaved`; or
            `[E, 2 F, H]` if `transposed`.
        down: `nnx.Param`, `[E, F, H]`, or `[E, H, F]`.
        gate_up_bias, down_bias: `nnx.Param`, `[E, 2 F]` and `[E, H]`, or None.
        gate_up_scales, down_scales: None, or after `quantize_experts`, `ExpertCodes`.
        shared_gate_up: `nnx.Param`, `[H, 2 S]` or `[2 S, H]`, of the shared expert, or None.
        shared_down: `nnx.Param`, `[S, H]` or `[H, S]`, or None.
        router_bias: `RouterBias`, `float32[E]`, or None.
        placement: `Placement`, or None.
        group: the group that calls use. Assign another one, with equal experts, to run the same
            parameters with another bound on tokens, such as in inference.
        top_k: K, which the group of a call must have. To choose more or fewer experts than in
            training, assign this as well as a group.
        deterministic: whether choices have no `capacity_factor`; `eval()` sets it, `train()` unsets
            it, as for `nnx.Dropout`. False at first.
    """

    def __init__(
        self,
        group: EPGroup,
        expert_size: int,
        *,
        router: RouterConfig | None = None,
        router_bias: bool = False,
        router_fn: Callable[..., Routes] | None = None,
        weights_on_input: bool = False,
        logit_bias: bool = False,
        expert_bias: bool = False,
        transposed: bool = False,
        interleaved: bool = False,
        clamp: tuple[float, float] | None = None,
        balance_per_sequence: bool = False,
        capacity_factor: float | None = None,
        capacity_axis: Axes = None,
        on_limit: str = "count",
        shared_size: int | None = None,
        token_axes: Axes | P = None,
        fsdp_axis: Axes = None,
        fp8_matmuls: bool = False,
        fp8_gradients: bool = False,
        expert_fn: Callable[..., jax.Array] | None = None,
        placement: ExpertPlacement | None = None,
        kernel_init: nnx.Initializer | None = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        check_is_group("nnx.MoE: group", group)
        self.expert_size = expert_size = check_count("expert_size", expert_size)
        n_shared = checks.check_shared_size(group, shared_size, expert_size)
        flags = {"router_bias": router_bias, "logit_bias": logit_bias, "expert_bias": expert_bias}
        check_flags("", **flags)
        checked = check_flags("", balance_per_sequence=balance_per_sequence, transposed=transposed)
        self.balance_per_sequence, self.transposed = checked
        self.fp8_matmuls, self.fp8_gradients = checks.check_fp8(fp8_matmuls, fp8_gradients)
        (self.weights_on_input,) = check_flags("", weights_on_input=weights_on_input)
        checks.check_param_dtype(param_dtype)
        checks.check_rngs(rngs)
        checks.check_formats(group, expert_size if fp8_matmuls else None)
        self.group, self.top_k, self.deterministic = group, group.config.top_k, False
        checks.check_weights_on_input(group, self.weights_on_input)
        self.placement = None if placement is None else Placement(group, placement)
        self.n_experts = (group.config if placement is None else placement).n_experts
        self.router_config = checks.check_router(group, router, self.n_experts, router_bias)
        self.router_fn = checks.check_callable("router_fn", router_fn)
        self.capacity_factor = checks.check_factor(capacity_factor)
        self.on_limit = check_on_drop("on_limit", on_limit)
        self.token_axes = check_token_axes(group, token_axes)
        self.capacity_axes = checks.check_capacity_axes(self.token_axes, capacity_axis)
        checks.check_has_factor(self.capacity_factor, self.capacity_axes, self.on_limit)
        self.follows_tokens = token_axes is None
        self.fsdp_axes = checks.check_fsdp_axes(group, self.token_axes, fsdp_axis)
        self.expert_fn = checks.check_callable("expert_fn", expert_fn) or expert_mlp
        self.interleaved = bool(interleaved)
        self.clamp = check_activation("nnx.MoE", interleaved, clamp)
        kernel_init = checks.check_callable("kernel_init", kernel_init)
        create = Parameters(group.mesh, kernel_init, param_dtype, rngs)
        self._create_parameters(create, n_shared, **flags)

    def _create_parameters(
        self,
        create: Parameters,
        n_shared: int,
        router_bias: bool,
        logit_bias: bool,
        expert_bias: bool,
    ) -> None:
        """Routed experts' are sharded along the group's axes, the others replicated."""
        n_experts, expert_size = self.n_experts, self.expert_size
        size, axis = self.group.config.hidden_size, self.group.axis_name
        fsdp = self.fsdp_axes or None
        matrix = functools.partial(create.matrix, transposed=self.transposed)
        self.router = create.matrix((size, n_experts), None, None)
        self.gate_up = matrix((n_experts, size, 2 * expert_size), axis, fsdp, None)
        self.down = matrix((n_experts, expert_size, size), axis, None, fsdp)
        self.shared_gate_up = matrix((size, 2 * n_shared), None, None) if n_shared else None
        self.shared_down = matrix((n_shared, size), None, None) if n_shared else None
        self.logit_bias = create.bias((n_experts,), None) if logit_bias else None
        sizes = 2 * expert_size, size
        biases = [create.bias((n_experts, n), axis, None) if expert_bias else None for n in sizes]
        self.gate_up_bias, self.down_bias = biases
        self.gate_up_scales = self.down_scales = nnx.data(None)
        self.router_bias = RouterBias(create.zeros((n_experts,), None)) if router_bias else None

    @jax.named_scope("moe")
    def __call__(
        self, tokens: jax.Array, mask: jax.Array | None = None, **router_args: Any
    ) -> tuple[jax.Array, MoEReport]:
        """Applies the layer; to arrays of the whole mesh, outside of `jax.shard_map`.

        Args:
            tokens: `[..., H]`, each dimension a multiple of the number of shards that its
                `token_axes` make; at most `max_tokens_per_rank` tokens in each. Converted to a
                dtype that the token format takes.
            mask: `bool[...]`, False for tokens that are padding: they go to no routed expert and
                count for nothing in the report. The layer treats them as zeros, whatever they
                hold, even NaN; their output and their gradient are zero. None: all True.
            **router_args: for `router_fn`, as they are, such as `rngs`.

        Returns:
            The output, in the shape and dtype of `tokens`, and the report, whose losses
            `nnx.capture` gets as `nnx.Intermediate`, too.

        Raises:
            TypeError: `tokens` or `mask` is not an array, `self.group` is not a group, `router_fn`
                does not return `Routes`, or there are `router_args` without it. While tracing.
            ValueError: a shape or dtype does not fit, also of routes, `self.group` does not fit the
                parameters, or the call is inside `jax.shard_map`. While tracing.
        """
        group = self.group
        by_token: Any = self._check_call(tokens, mask)
        options = {each.name: getattr(self, each.name) for each in fields(Forward)}
        options["token_axes"] = by_token
        if self.deterministic:
            options |= {"capacity_factor": None, "on_limit": "count"}
        weights = self._weights()
        if isinstance(self.expert_fn, nnx.Module):
            graph, weights["expert_fn"] = nnx.split(self.expert_fn)
            checks.check_by_expert(group, weights["expert_fn"], self.n_experts)
            options["expert_fn"] = functools.partial(nnx.merge, graph)
        specs = {name: P(group.axis_name) if name in BY_EXPERT else P() for name in weights}
        for name in ("gate_up", "down"):
            before_hidden = [None] * (hidden_axis(name, self.transposed) - 1)
            specs[name] = P(group.axis_name, *before_hidden, self.fsdp_axes or None)
        report: Any = MoEReport._make([P()] * len(MoEReport._fields))
        layer = jax.shard_map(
            Forward(**options),
            mesh=group.mesh,
            in_specs=(specs, by_token, by_token, by_token),
            out_specs=(by_token, report._replace(topk_ids=by_token)),
        )
        routes = call_router_fn(self, tokens, mask, router_args)
        output, report = layer(weights, tokens, mask, routes)
        sow_losses(self, report)
        return output, report

    def router_logits(self, tokens: jax.Array) -> jax.Array:
        """`float32[..., E]`: `tokens @ router`, in float32, plus `logit_bias`; for a `router_fn`.

        Args:
            tokens: `[..., H]`, of any floating-point dtype.
        """
        bias = None if self.logit_bias is None else self.logit_bias[...].astype(jnp.float32)
        return router_logits(tokens, self.router[...].astype(jnp.float32), bias)

    def route(self, logits: jax.Array) -> Routes:
        """`jax_ep.router.route` with the layer's config, K and bias; for a `router_fn`.

        Args:
            logits: `[..., E]`, for tokens `[..., H]` of the whole mesh.

        Raises:
            ValueError: a shape or dtype does not fit. While tracing.
        """
        bias = None if self.router_bias is None else self.router_bias[...]
        return route_shards(self, logits, bias)

    def set_view(self, deterministic: bool | None = None) -> None:
        """Called by `nnx.view`; sets `deterministic`, unless it is None."""
        if deterministic is not None:
            self.deterministic = deterministic

    def update_bias(self, expert_load: jax.Array, rate: float = 1e-3) -> None:
        """Moves the bias towards equal loads: `jax_ep.router.update_bias`.

        Inside `jax.jit` or not; for a load on the devices, also under
        `jax.transfer_guard("disallow")`.

        Args:
            expert_load: `[E]`, the sum of the reports' `expert_load` over a step; `[n_layers, E]`
                for layers stacked by `nnx.vmap`.
            rate: as for `jax_ep.router.update_bias`. 0 leaves the bias as it is.

        Raises:
            ValueError: the layer has no bias.
        """
        if self.router_bias is None:
            raise ValueError(
                "update_bias: the layer must have a bias; create it with router_bias=True."
            )
        bias = self.router_bias[...]
        self.router_bias[...] = move_bias(self.group.mesh, bias, expert_load, rate)

    def quantize_experts(self) -> None:
        """Replaces the experts' matrices by codes, for inference with `fp8_matmuls`.

        `gate_up` becomes `ExpertCodes`, float8_e4m3fn `[E, 2 F, H]`, with `gate_up_scales`,
        `float32[E, 2 F / 128, H / 128]`; `down` alike, `[E, H, F]`: what `jax_ep.quantize_weights`
        makes of them, so that calls give the same bits as before. A quarter of the memory of
        float32 parameters; no gradient reaches them. In layers stacked by `nnx.vmap`, all arrays
        have an axis of layers before E.

        Raises:
            ValueError: the layer has no `fp8_matmuls`, has an `fsdp_axis` or a fused shared
                expert, or its experts are codes already.
        """
        checks.check_quantizable(self)
        quantize_experts(self)

    def __copy__(self) -> Self:
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises TypeError: pickle cannot store the mesh, which the variables' metadata has."""
        raise TypeError(
            "nnx.MoE must be saved as arrays; got pickle, which cannot store the devices of the "
            "mesh in its variables' metadata. Pickle nnx.to_pure_dict(nnx.state(model)), and put "
            "the arrays into a new model (docs/layers.md)."
        )

    def _check_call(self, tokens: jax.Array, mask: jax.Array | None) -> P:
        """How tokens are sharded; requires a group that the parameters fit, and such tokens."""
        checks.check_outside_shard_map()
        self._check_fits()
        checks.check_tokens(self.group, tokens)
        if mask is not None:
            checks.check_mask(self.group, mask, tokens.shape[:-1])
        spec = spec_of_call(self.group, self.token_axes, self.follows_tokens, tokens)
        if mask is not None:
            check_sharded_alike(self.group, spec, mask)
        checks.check_fsdp_axes(self.group, spec, self.fsdp_axes)
        checks.check_capacity_axes(spec, self.capacity_axes)
        return spec

    def _check_fits(self) -> None:
        """Requires a group that the parameters fit: it may not be the one they were made with."""
        check_is_group("nnx.MoE: group", self.group)
        config, call = self.group.config, self.group.geometry.call("nnx.MoE")
        n_experts = config.n_experts
        if self.placement is not None:
            check_placement("nnx.MoE", self.group, self.placement.get())
            n_experts = self.router.shape[1]
        shape = config.hidden_size, n_experts
        if self.router.shape != shape:
            raise ValueError(
                f"{call}: the group must have the layer's experts: [H, E] = "
                f"{list(self.router.shape)}; got {list(shape)}."
            )
        checks.check_top_k(self.group, self.top_k)
        checks.check_weights_on_input(self.group, self.weights_on_input)
        check_token_axes(self.group, self.token_axes)
        expert_size, shared = self.expert_size, self.shared_down
        if config.fused_shared_expert:
            n_shared = None if shared is None else shared.shape[1 if self.transposed else 0]
            checks.check_fused_size(self.group, expert_size, n_shared)
        checks.check_formats(self.group, expert_size if self.fp8_matmuls else None)

    def _weights(self) -> dict[str, Any]:
        """The arrays that a call uses, in the dtypes that it computes in."""
        dtypes = dict.fromkeys(_EXPERTS, self.group.config.combine_dtype)
        dtypes |= dict.fromkeys(_ROUTER, jnp.float32)
        weights: dict[str, Any] = {}
        for name in (*dtypes, "router_bias", "gate_up_scales", "down_scales"):
            x = getattr(self, name)
            if x is not None:
                is_param = isinstance(x, nnx.Param)
                weights[name] = x[...].astype(dtypes[name]) if is_param else x[...]
        if self.placement is not None:
            weights["placement"] = self.placement.get()
        return weights
