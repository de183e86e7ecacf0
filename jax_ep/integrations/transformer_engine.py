"""Transformer Engine's names for expert parallelism in JAX, on dispatch and combine.

The calls take and return what those of `transformer_engine.jax.ep` 2.20.2 do: arrays of the whole
mesh, outside of `jax.shard_map`. D is the number of shards of the tokens, C is
`recv_capacity_per_rank`. Transformer Engine itself is not needed.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import P

import jax_ep
from jax_ep.integrations.groups import group_of


@dataclasses.dataclass(frozen=True)
class EpLayerConfig:
    """What a layer adds to `ep_bootstrap`; groups of rows are padded to multiples of the second."""

    top_k: int
    dispatch_output_per_expert_alignment: int = 0


@dataclasses.dataclass(frozen=True)
class _Settings:
    mesh: jax.sharding.Mesh
    axis: str
    spec: P  # of the leading dimension of all arrays
    sizes: dict[str, Any]  # of EPConfig
    drop_on_overflow: bool


_settings: _Settings | None = None


def ep_bootstrap(
    world_size: int | None,
    rank: int | None,
    num_experts: int,
    max_tokens_per_rank: int,
    recv_capacity_per_rank: int,
    hidden_dim: int,
    max_token_dtype: Any = jnp.bfloat16,
    max_num_sms: int = 0,
    drop_on_overflow: bool = False,
    *,
    ep_resource: str,
    dp_resource: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> None:
    """Sets the sizes of the calls of this process that follow.

    Args:
        world_size: size of the mesh, or None.
        rank: of no effect: ranks follow from the mesh.
        num_experts: `n_experts` of `EPConfig`.
        max_tokens_per_rank: as there.
        recv_capacity_per_rank: `recv_capacity` there.
        hidden_dim: `hidden_size` there.
        max_token_dtype: of all tokens: bfloat16, float16 or float32.
        max_num_sms: `n_sms` of `EPConfig`; 0 for None.
        drop_on_overflow: must be True if C may be too few: rows are dropped, there is no trap.
        ep_resource: mesh axis of the experts, as in Transformer Engine's `MeshResource`.
        dp_resource: another axis that tokens are sharded over, outside of the former.
        mesh: None is the mesh of `jax.set_mesh`.

    Raises:
        ValueError: there is no mesh, or it has another size or no such axes.
    """
    global _settings
    del rank
    mesh = jax.sharding.get_mesh() if mesh is None else mesh
    axes = (ep_resource,) if dp_resource is None else (dp_resource, ep_resource)
    if not set(axes) <= set(mesh.axis_names):
        raise ValueError(
            f"ep_bootstrap needs a mesh with the axes {axes}, from jax.set_mesh or as an argument; "
            f"got {mesh.axis_names}."
        )
    if world_size not in (None, mesh.size):
        raise ValueError(f"world_size must be the mesh's, {mesh.size}, or None; got {world_size}.")
    sizes = {
        "n_experts": num_experts,
        "max_tokens_per_rank": max_tokens_per_rank,
        "recv_capacity": recv_capacity_per_rank,
        "hidden_size": hidden_dim,
        "n_sms": max_num_sms or None,
        "token_format": jax_ep.Plain(max_token_dtype),
        "combine_dtype": max_token_dtype,
        "zero_unused_rows": True,
    }
    _settings = _Settings(mesh, ep_resource, P(axes), sizes, drop_on_overflow)


def ep_prepare(cfg: EpLayerConfig, topk_idx: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
    """`(token_counts, total_recv_tokens, handle_mem)`, as `ep_dispatch` returns them."""

    def local(ids: jax.Array) -> Any:
        group = _group(cfg)
        dtype = group.config.combine_dtype
        narrow = jnp.zeros((*ids.shape[:-1], 16 // dtype.itemsize), dtype)  # the least that travels
        return _results(jax_ep.dispatch(group, narrow, ids))

    return _map(local, topk_idx)


def ep_dispatch(
    cfg: EpLayerConfig,
    topk_idx: jax.Array,
    tokens: jax.Array,
    topk_weights: jax.Array,
    recv_capacity_per_rank: int,
) -> tuple[jax.Array, jax.Array, Any, jax.Array, jax.Array]:
    """Sends `[..., H]` tokens, sharded over their leading dimension, to their experts.

    Returns:
        `recv_tokens` `[D, C, H]` and `recv_topk_weights` `float32[D, C]`, zero in padding and
        unused rows; `handle_mem`; `token_counts` `int32[D, L]`, padding included;
        `total_recv_tokens` `int32[D, 1]`, dropped rows included.
    """

    def local(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> Any:
        rows = jax_ep.dispatch(_group(cfg, recv_capacity_per_rank), tokens, ids, weights)
        assert rows.row_weights is not None
        missing = recv_capacity_per_rank - len(rows.tokens)  # beyond the worst case
        received = jnp.pad(rows.tokens, ((0, missing), (0, 0)))
        received_weights = jnp.pad(rows.row_weights, (0, missing))
        counts, total, handle = _results(rows)
        return received[None], received_weights[None], handle, counts, total

    return _map(local, tokens, topk_idx, topk_weights)


def ep_combine(
    cfg: EpLayerConfig,
    handle_mem: Any,
    token_counts: jax.Array,
    expert_out: jax.Array,
    num_local_tokens: int | tuple[int, ...],
    out_sharding: Any = None,
) -> jax.Array:
    """Sums each token's rows to `[..., H]`, unweighted: the caller applies `recv_topk_weights`.

    Args:
        cfg: that of the dispatch.
        handle_mem: from `ep_dispatch` or `ep_prepare`.
        token_counts: of no effect.
        expert_out: `[D, C, H]`.
        num_local_tokens: leading dimensions of the result, those of all tokens.
        out_sharding: entries of a `PartitionSpec`; None for that of the tokens.
    """
    del cfg, token_counts

    def local(handle: Any, results: jax.Array) -> jax.Array:
        rows = jax.tree.map(lambda leaf: leaf[0], handle)
        return jax_ep.combine(rows.group, results[0, : len(rows.src_info)], rows)

    output = _map(local, handle_mem, expert_out)
    leading = (num_local_tokens,) if isinstance(num_local_tokens, int) else num_local_tokens
    output = output.reshape(*leading, output.shape[-1])
    spec = _bootstrapped().spec if out_sharding is None else P(*out_sharding)
    sharding = jax.NamedSharding(_bootstrapped().mesh, spec)
    return jax.lax.with_sharding_constraint(output, sharding)


def _bootstrapped() -> _Settings:
    if _settings is None:
        raise ValueError("ep_bootstrap must be called first: it sets the sizes of all calls.")
    return _settings


def _group(cfg: EpLayerConfig, recv_capacity: int | None = None) -> jax_ep.EPGroup:
    settings, alignment = _bootstrapped(), cfg.dispatch_output_per_expert_alignment or 1
    config = jax_ep.EPConfig(**settings.sizes, top_k=cfg.top_k, row_alignment=alignment)
    if recv_capacity is not None:
        config = dataclasses.replace(config, recv_capacity=recv_capacity)
    n_ranks = settings.mesh.shape[settings.axis]
    worst = dataclasses.replace(config, recv_capacity=None).max_recv_tokens(n_ranks)
    if not settings.drop_on_overflow and config.max_recv_tokens(n_ranks) < worst:
        raise ValueError(
            f"recv_capacity_per_rank must be at least {worst}, the worst case, without "
            f"drop_on_overflow=True, as jax_ep never traps; got {config.recv_capacity}."
        )
    return group_of(settings.mesh, settings.axis, config, "auto")


def _results(rows: jax_ep.Dispatched) -> tuple[jax.Array, jax.Array, Any]:
    """Counts and handle, with an axis for the rank."""
    total = rows.row_offsets[-1].astype("int32") + rows.n_dropped
    handle = dataclasses.replace(rows, tokens=rows.tokens[:0], row_weights=None)
    return jax.tree.map(lambda leaf: leaf[None], (rows.group_sizes, total[None], handle))


def _map(local: Callable[..., Any], *arrays: Any) -> Any:
    mesh, spec = _bootstrapped().mesh, _bootstrapped().spec
    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)(*arrays)
