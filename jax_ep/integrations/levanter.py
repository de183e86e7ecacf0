"""Levanter's grug: `MoEExpertMlp`, with dispatch and combine for its exchange.

`expert_mlp` returns experts with the same weights, at the same places of the tree. Models call them
as they call grug's own, such as through `QBRoutedMoE`.
"""

import functools
import importlib
import math
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import P
from jax.ad_checkpoint import checkpoint_name

import jax_ep
from jax_ep.integrations.groups import group_of

# Fields of MoEExpertMlp that only other exchanges use, with their values where these do not run.
_UNUSED = {"pooled_transport_capacity_factor": None, "expert_chunks": 1, "num_expert_waves": 1}


class Settings(NamedTuple):
    """What the group is made with; the rest follows from arrays."""

    mesh: jax.sharding.Mesh
    transport: str
    options: tuple[tuple[str, Any], ...]


def expert_mlp(
    experts: Any, mesh: jax.sharding.Mesh, transport: str = "auto", **options: Any
) -> Any:
    """Grug's experts, with dispatch and combine in place of the exchange of `implementation`.

    `capacity_factor` f sets `recv_capacity` to f times the mean, `T * top_k` rows, padding tokens
    included. Rows beyond it are dropped, and counted as `receiver_dropped`. On a mesh without an
    axis "expert", or one of size 1, the experts stay grug's own.

    Args:
        experts: a `MoEExpertMlp`.
        mesh: grug's, with its devices.
        transport: as for `ep_init`.
        options: further parameters of `EPConfig`, such as `n_sms`; sizes and dtypes are grug's.

    Returns:
        A `MoEExpertMlp`.

    Raises:
        ImportError: Levanter is not installed.
        TypeError: the mesh has no devices, or `experts` is not a `MoEExpertMlp`.
        ValueError: a field of `experts` does not fit; the message names it. Or, when they are
            called, tokens are not sharded over "expert".
    """
    try:
        grug_moe = importlib.import_module("levanter.grug.grug_moe")
    except ImportError as error:
        raise ImportError(
            "jax_ep.integrations.levanter.expert_mlp needs marin-levanter; see "
            "docs/recipes/levanter.md."
        ) from error
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, which has devices; got {mesh!r}.")
    if not isinstance(experts, grug_moe.MoEExpertMlp):
        raise TypeError(f"experts must be a MoEExpertMlp of levanter.grug; got {experts!r}.")
    check(experts)
    if mesh.shape.get("expert", 1) == 1:
        return experts
    fields = {name: getattr(experts, name) for name in experts.__dataclass_fields__}
    fields["settings"] = Settings(mesh, transport, tuple(sorted(options.items())))
    return _class_of(grug_moe)(**fields)


def check(experts: Any) -> None:
    """Raises ValueError for fields of a `MoEExpertMlp` that do not fit."""
    for name, needed in _UNUSED.items():
        if (got := getattr(experts, name)) != needed:
            raise ValueError(
                f"MoEExpertMlp's {name} must be {needed} with jax_ep, which has one capacity, "
                f"capacity_factor, and sends all tokens at once; got {got}."
            )


@functools.cache
def _class_of(grug_moe: Any) -> Any:
    static = functools.partial(importlib.import_module("equinox").field, static=True)

    class MoEExpertMlp(grug_moe.MoEExpertMlp):
        settings: Settings | None = static(default=None)

        def __call__(
            self,
            x: jax.Array,
            selected_experts: jax.Array,
            combine_weights: jax.Array,
            *,
            token_valid: jax.Array | None = None,
            mesh: Any = None,
            report_capacity_overflow: bool = False,
        ) -> Any:
            if token_valid is None:
                token_valid = jnp.ones(x.shape[0], bool)
            output, dropped = _exchange(self, x, selected_experts, combine_weights, token_valid)
            if not report_capacity_overflow:
                return output
            skipped = jnp.sum(~token_valid, dtype="int32") * selected_experts.shape[1]
            return output, grug_moe.MoeDispatchCounts(jnp.zeros_like(dropped), dropped, skipped)

    return MoEExpertMlp


def _exchange(experts: Any, x: jax.Array, *routing: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The layer on the whole mesh, whose axes are explicit: arrays need the sharding of specs."""
    spec = jax.typeof(x).sharding.spec
    axes = spec[0] if isinstance(spec[0], tuple) else (spec[0],)
    if "expert" not in axes:
        raise ValueError(f"tokens must be sharded over 'expert' with jax_ep; got {spec}.")
    gate_up = jnp.concatenate([experts.w_gate, experts.w_up], axis=-1)
    specs = (P(axes),) * 4 + (P("expert"),) * 2
    arrays = x, *routing, gate_up, experts.w_down
    arrays = tuple(map(jax.sharding.reshard, arrays, specs))  # gathers weights over "data"
    on_each_rank = functools.partial(_on_each_rank, experts, axes)
    return jax.shard_map(on_each_rank, in_specs=specs, out_specs=(P(axes), P()))(*arrays)


def _on_each_rank(
    experts: Any, axes: tuple[str, ...], x: Any, ids: Any, weights: Any, valid: Any, *matrices: Any
) -> tuple[jax.Array, jax.Array]:
    gate_up, down = matrices
    mesh, transport, options = experts.settings
    config = jax_ep.EPConfig(
        n_experts=experts.w_down.shape[0],
        top_k=ids.shape[-1],
        hidden_size=x.shape[-1],
        max_tokens_per_rank=len(x),
        recv_capacity=max(len(down), math.ceil(Fraction(str(experts.capacity_factor)) * ids.size)),
        token_format=jax_ep.Plain(x.dtype),
        combine_dtype=x.dtype,
        **dict(options),
    )
    group = group_of(mesh, "expert", config, transport)
    rows = jax_ep.dispatch(group, x, jnp.where(valid[:, None], ids, -1), weights)
    rows = jax.tree.map(lambda leaf: checkpoint_name(leaf, "grug_moe_dispatch_input"), rows)
    hidden = jax_ep.grouped_matmul(rows.tokens, gate_up, rows.row_offsets)
    gate, up = jnp.split(checkpoint_name(hidden, "grug_moe_expert_hidden"), 2, axis=-1)
    activate = getattr(experts.activation, "to_jax_fn", lambda: experts.activation)()
    results = jax_ep.grouped_matmul(activate(gate) * up, down, rows.row_offsets)
    results = checkpoint_name(results, "grug_moe_dispatch_output")
    return jax_ep.combine(group, results, rows), jax.lax.psum(rows.n_dropped, axes)
