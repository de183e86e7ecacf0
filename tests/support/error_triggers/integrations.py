"""Misuses of jax_ep inside other frameworks, none of which the tests install."""

import types

import jax.numpy as jnp
import pytest

from error_triggers.base import E, H, K, R, T, make_mesh
from jax_ep.integrations import levanter, maxtext, transformer_engine


def maxtext_config(**options) -> types.SimpleNamespace:
    needed = {name: value for name, (value, _) in maxtext._REQUIRED.items()}
    return types.SimpleNamespace(**({"attention": "flash"} | needed | options))


def grug_experts(**fields) -> types.SimpleNamespace:
    return types.SimpleNamespace(**(levanter._UNUSED | fields))


def bootstrap(**options) -> None:
    sizes = dict(num_experts=E, max_tokens_per_rank=T, recv_capacity_per_rank=1, hidden_dim=H)
    given = dict(world_size=None, rank=None, ep_resource="ep", mesh=make_mesh())
    transformer_engine.ep_bootstrap(**(sizes | given | options))


def prepare_with_too_few_rows() -> None:
    bootstrap()
    transformer_engine.ep_prepare(transformer_engine.EpLayerConfig(K), jnp.zeros((R * T, K), int))


def prepare_without_bootstrap() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer_engine, "_settings", None)
        transformer_engine.ep_prepare(transformer_engine.EpLayerConfig(K), jnp.zeros((T, K), int))


TRIGGERS = {
    "maxtext-missing": lambda: maxtext.install(),
    "maxtext-option": lambda: maxtext.check(maxtext_config(use_ring_of_experts=True)),
    "maxtext-attention": lambda: maxtext.check(maxtext_config(attention="vllm_rpa")),
    "levanter-missing": lambda: levanter.expert_mlp(None, make_mesh()),
    "levanter-field": lambda: levanter.check(grug_experts(expert_chunks=2)),
    "te-mesh": lambda: bootstrap(ep_resource="expert"),
    "te-world": lambda: bootstrap(world_size=3),
    "te-first": prepare_without_bootstrap,
    "te-capacity": prepare_with_too_few_rows,
    "levanter-tokens": lambda: levanter._exchange(None, jnp.ones((2, 2))),
}
