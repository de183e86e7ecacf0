"""Which transports serve the devices at hand, found by trying."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep
from jax_ep.cli.workload import AXIS, make_mesh, on_mesh, random_choices, shard
from jax_ep.group.select import NAMES

_TOP_K = 2


class Verdict(NamedTuple):
    """Whether a transport works: the reason why not, or None."""

    transport: str
    reason: str | None


def try_transports(ranks: Sequence[jax.Device]) -> list[Verdict]:
    """Sends a few tokens there and back over each transport, one rank per device."""
    return [Verdict(name, _try(name, ranks)) for name in NAMES]


def _try(name: str, ranks: Sequence[jax.Device]) -> str | None:
    mesh = make_mesh(ranks)
    config = jax_ep.EPConfig(
        n_experts=2 * len(ranks),
        top_k=_TOP_K,
        hidden_size=64,
        max_tokens_per_rank=16,
        timeout_s=20.0,
    )
    try:
        with jax_ep.ep_init(mesh, AXIS, config, name) as group:
            return _round_trip(mesh, group)
    except ValueError as error:
        return str(error).removeprefix(f"Transport {name!r} cannot serve: ")
    except Exception as error:  # whatever a broken setup raises is the verdict
        return f"{type(error).__name__}: {error}"


def _round_trip(mesh: jax.sharding.Mesh, group: jax_ep.EPGroup) -> str | None:
    """With identity experts, every token must come back `top_k` times."""
    config = group.config
    choices = random_choices(config, group.n_ranks, seed=0)
    shape = (*choices.shape[:2], config.hidden_size)
    tokens = np.random.default_rng(1).integers(-100, 100, shape).astype(np.float32)

    def layer(tokens: jax.Array, topk_ids: jax.Array) -> jax.Array:
        rows = jax_ep.dispatch(group, tokens.astype(jnp.bfloat16), topk_ids)
        return jax_ep.combine(group, rows.tokens, rows)

    out = on_mesh(mesh, layer)(shard(mesh, tokens), shard(mesh, choices))
    n_wrong = int((np.asarray(out, np.float32) != _TOP_K * tokens).sum())
    group.check()
    return f"{n_wrong} of {tokens.size} numbers came back wrong" if n_wrong else None
