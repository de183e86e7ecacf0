"""The calls of `p2p` that say where choices go: balance.py, in two kernels around an all-gather."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.exchange.calls import coordinate
from jax_ep.exchange.checks import vary_alike
from jax_ep.ffi.lowering import Attributes, custom_call, fusion_barrier, like, make_primitive
from jax_ep.geometry import Geometry

_MAX_WORDS = 24 * 1024  # kMaxBalanceSmemBytes / 4 in C++
# Choices that a block takes at least, and blocks: each makes the whole plan.
_BLOCK, _MAX_BLOCKS = 1024, 64


def can_balance(geometry: Geometry) -> bool:
    """Whether the plan fits in a block's shared memory: BalanceSmemBytes in C++."""
    return geometry.config.n_experts * (geometry.n_ranks + 32) <= _MAX_WORDS


def balance_choices(
    geometry: Geometry, topk_ids: jax.Array, all_gather: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """`routing.balance_choices`."""
    (ids,) = vary_alike(geometry.axis_names, topk_ids.reshape(-1))
    counts, block_counts = count_choices_p.bind(ids, n_experts=geometry.config.n_experts)
    operands = vary_alike(geometry.axis_names, ids, block_counts, all_gather(counts))
    group_ids, copies = balance_choices_p.bind(coordinate(geometry), *operands, geometry=geometry)
    return group_ids.reshape(topk_ids.shape), copies


def _n_blocks(n_choices: int) -> int:
    return min(max(-(-n_choices // _BLOCK), 1), _MAX_BLOCKS)


def _counts_types(ids: Any, *, n_experts: int) -> list[Any]:
    shapes = (n_experts,), (_n_blocks(ids.shape[0]), n_experts)
    return [like(ids, shape, jnp.int32) for shape in shapes]


def _types(_: Any, ids: Any, *__: Any, geometry: Geometry) -> list[Any]:
    shapes = ids.shape, (geometry.n_ranks, geometry.config.expert_copies)
    return [like(ids, shape, jnp.int32) for shape in shapes]


def _attributes(geometry: Geometry) -> dict[str, Any]:
    return dict(
        n_ranks_per_node=np.int32(geometry.routed.n_ranks_per_node),
        n_shared=np.int32(geometry.config.fused_shared_expert),
    )


def _make(name: str, attributes: Attributes, types: Callable[..., list[Any]]) -> Any:
    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        return fusion_barrier(custom_call(name)(ctx, *operands, **attributes(**params)))

    primitive = make_primitive(name, cuda=lower)
    primitive.def_abstract_eval(types)
    return primitive


count_choices_p = _make("jax_ep_count_choices", lambda n_experts: {}, _counts_types)
balance_choices_p = _make("jax_ep_balance_choices", _attributes, _types)
