"""Misuses of jax_ep.checkpoints."""

import pathlib
import tempfile
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from error_triggers.base import E, H, init
from error_triggers.layers import fp8_layer, layer
from jax_ep.checkpoints import QWEN3_MOE, from_config, open_safetensors
from jax_ep.checkpoints.shards import Part, gather

KEY = "model.layers.0.mlp.experts.0.gate_proj.weight"


def tensors(size: int = H, **changes: Any) -> dict[str, Any]:
    prefix = "model.layers.0.mlp."
    keys = [f"experts.{e}.{name}_proj" for e in range(E) for name in ("gate", "up", "down")]
    made = {f"{prefix}{key}.weight": np.ones((size, size)) for key in keys}
    return made | {f"{prefix}gate.weight": np.ones((E, size))} | changes


def load(changed: dict[str, Any], layers: Any = 0, size: int = H, **options: Any) -> None:
    QWEN3_MOE.load(layer(init(), **options), tensors(size) | changed, layers)


def load_codes() -> None:
    quantized = fp8_layer()
    quantized.quantize_experts()
    QWEN3_MOE.load(quantized, tensors(128), 0)


def open_file(data: bytes | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if data is not None:
            pathlib.Path(folder, "model.safetensors").write_bytes(data)
        open_safetensors(folder)


def header(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


TRIGGERS = {
    "checkpoint-model": lambda: from_config({"model_type": "llama4"}),
    "checkpoint-field": lambda: from_config({"model_type": "mixtral"}),
    "checkpoint-type": lambda: QWEN3_MOE.load({}, tensors(), 0),
    "checkpoint-parameters": lambda: load({}, logit_bias=True),
    "checkpoint-interleaved": lambda: load({}, interleaved=True),
    "checkpoint-layers": lambda: load({}, range(2)),
    "checkpoint-traced": lambda: nnx.jit(lambda x: QWEN3_MOE.load(x, tensors(), 0))(layer(init())),
    "checkpoint-key": lambda: QWEN3_MOE.load(layer(init()), tensors(), 1),
    "checkpoint-shape": lambda: load({KEY: np.ones((H, 2 * H))}),
    "checkpoint-dtype": lambda: load({KEY: np.ones((H, H), np.int8)}),
    "checkpoint-scales": lambda: load({KEY: np.ones((H, H), ml_dtypes.float8_e4m3fn)}),
    "checkpoint-codes": load_codes,
    "checkpoint-halves": lambda: gather(
        [(((0, 1), (0, 2)), jnp.ones((1, 2)))], Part("x", ((0, 1), (0, 4)), 0, False)
    ),
    "checkpoint-files": lambda: open_file(None),
    "checkpoint-file": lambda: open_file(b"\xff" * 16),
    "checkpoint-file-dtype": lambda: open_file(header('{"x": {"dtype": "F4"}}')),
}
