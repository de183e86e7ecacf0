"""A layer that is loaded and saved in two processes, for test_checkpoints.py."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from harness import assert_same_bits
from jax_ep import EPConfig, ep_init
from jax_ep.checkpoints import QWEN3_MOE
from jax_ep.nnx import MoE
from published_layers import E, F, H, K, Qwen3


class Watched(dict):
    """Tensors that remember which of them were asked for."""

    def __init__(self, tensors: dict) -> None:
        super().__init__(tensors)
        self.seen: set[str] = set()

    def __getitem__(self, key: str) -> np.ndarray:
        self.seen.add(key)
        return super().__getitem__(key)


def abstract_layer(axes, **options) -> MoE:
    devices = np.array(jax.devices()).reshape(tuple(axes.values()))
    mesh = jax.sharding.Mesh(devices, tuple(axes))
    config = EPConfig(n_experts=E, top_k=K, hidden_size=H, max_tokens_per_rank=8)
    group = ep_init(mesh, "ep", config)
    options = {"param_dtype": jnp.bfloat16, **options}
    return nnx.eval_shape(lambda: MoE(group, F, rngs=nnx.Rngs(0), **options))


def check_that_processes_share_the_experts() -> None:
    """Each reads and saves its own, the first one the router as well."""
    tensors = Watched(Qwen3().tensors(0))
    layer, first = abstract_layer({"ep": 4}), E // 2 * jax.process_index()
    QWEN3_MOE.load(layer, tensors, 0)
    saved = dict(QWEN3_MOE.save(layer, 0))
    own = tuple(f"model.layers.0.mlp.experts.{first + e}." for e in range(E // 2))
    experts = {key for key in tensors if key.startswith(own)}
    router = {"model.layers.0.mlp.gate.weight"}
    assert tensors.seen == experts | router
    assert saved.keys() == (experts if jax.process_index() else experts | router)
    for key, x in saved.items():
        assert_same_bits(x, tensors[key], key)
    replicated = abstract_layer({"dp": 2, "ep": 2})
    QWEN3_MOE.load(replicated, tensors, 0)
    assert len(dict(QWEN3_MOE.save(replicated, 0))) == (0 if jax.process_index() else len(tensors))


def check_that_halves_of_experts_are_refused() -> None:
    layer = abstract_layer({"dp": 2, "ep": 2}, fsdp_axis="dp")
    QWEN3_MOE.load(layer, Qwen3().tensors(0), 0)
    try:
        dict(QWEN3_MOE.save(layer, 0))
    except ValueError as error:
        assert "gate_proj.weight' must be on devices of one process; got 16384 of" in str(error)
    else:
        raise AssertionError("a process saved tensors of which it has a half")


def check() -> None:
    check_that_processes_share_the_experts()
    check_that_halves_of_experts_are_refused()
