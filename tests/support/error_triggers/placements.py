"""Misuses of expert placements."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_ep
from error_triggers.base import E, H, R, init, operands, run
from jax_ep.nnx import MoE

IN_ORDER = np.arange(E)


def placement(logical: Any = IN_ORDER, **options: Any) -> jax_ep.ExpertPlacement:
    return jax_ep.ExpertPlacement(logical, R, **options)


def place(given: Any, **changes: Any) -> None:
    group = init(**changes)
    run(lambda rank: jax_ep.place_choices(group, operands()[1], given).topk_ids)


def replicate(weights: Any) -> None:
    group, given = init(), placement()
    run(lambda rank: jax_ep.replicate_experts(group, weights, given))


def fetch(weights: Any) -> None:
    group = init(expert_copies=2)
    run(lambda rank: jax_ep.fetch_experts(jax_ep.dispatch(group, *operands()[:2]), weights))


def replace(given: Any) -> None:
    MoE(init(), H, placement=placement(), rngs=nnx.Rngs(0)).placement.set(given)


TRIGGERS: dict[str, Callable[[], Any]] = {
    "placement-type": lambda: place(IN_ORDER),
    "placement-sizes": lambda: place(placement([*IN_ORDER, 2, 3, 0, 1])),
    "placement-same": lambda: place(placement(local_first=True), skip_a2a=True),
    "placement-traced": lambda: jax.jit(placement)(IN_ORDER),
    "placement-dtype": lambda: placement(np.ones(E)),
    "placement-count": lambda: placement(np.arange(E + 1)),
    "placement-missing": lambda: placement([0, 1, 2, 4]),
    "placement-experts": lambda: placement([0, 1, 2, 0, 1, 2, 3, 4]),
    "placement-twice": lambda: placement([0, 0, 1, 1, 2, 2, 3, 3]),
    "placement-mask": lambda: placement().mask_ranks(jnp.ones(E, bool)),
    "placement-mask-dtype": lambda: placement().mask_ranks(jnp.ones(R)),
    "placement-load": lambda: placement().logical_load(np.ones(E + 1)),
    "placement-state": lambda: replace(placement(local_first=True)),
    "placement-state-type": lambda: replace(IN_ORDER),
    "replicate-shape": lambda: replicate(jnp.ones((E, H))),
    "fetch-shape": lambda: fetch(jnp.ones((E, H))),
    "rebalance-load": lambda: jax_ep.rebalance(np.ones((2, 2, E)), R, 0),
    "rebalance-traced": lambda: jax.jit(jax_ep.rebalance, static_argnums=(1, 2))(np.ones(E), R, 0),
    "rebalance-values": lambda: jax_ep.rebalance(-np.ones(E), R, 0),
    "rebalance-sizes": lambda: jax_ep.rebalance(np.ones(E), 3, 0),
    "rebalance-redundant": lambda: jax_ep.rebalance(np.ones(E), R, 2),
    "rebalance-slack": lambda: jax_ep.rebalance(np.ones(E), R, 0, home_slack=-1),
}
