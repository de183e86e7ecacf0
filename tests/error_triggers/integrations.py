"""Misuses of jax_ep inside other frameworks, none of which the tests install."""

import types

import jax.numpy as jnp

from error_triggers.base import make_mesh
from jax_ep.integrations import levanter, maxtext


def maxtext_config(**options) -> types.SimpleNamespace:
    needed = {name: value for name, (value, _) in maxtext._REQUIRED.items()}
    return types.SimpleNamespace(**({"attention": "flash"} | needed | options))


def grug_experts(**fields) -> types.SimpleNamespace:
    return types.SimpleNamespace(**(levanter._UNUSED | fields))


TRIGGERS = {
    "maxtext-missing": lambda: maxtext.install(),
    "maxtext-option": lambda: maxtext.check(maxtext_config(use_ring_of_experts=True)),
    "maxtext-attention": lambda: maxtext.check(maxtext_config(attention="vllm_rpa")),
    "levanter-missing": lambda: levanter.expert_mlp(None, make_mesh()),
    "levanter-field": lambda: levanter.check(grug_experts(expert_chunks=2)),
    "levanter-tokens": lambda: levanter._exchange(None, jnp.ones((2, 2))),
}
