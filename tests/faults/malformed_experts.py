"""Malformed calls of what experts do with rows: matmuls, activation, formats."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep
from malformed_base import (
    INF,
    NAN,
    E,
    F,
    H,
    K,
    L,
    T,
    add,
    add_all,
    bf16,
    f32,
    fp8,
    group_of,
    i32,
    ids,
    ones,
    other_dtypes,
    run,
    wrong_arrays,
)

# Wrong values of an argument that several calls have.
OFFSETS = {
    "None": None,
    "int32": np.int32([0, 2, 4]),
    "float": np.float32([0, 2, 4]),
    "empty": np.uint32([]),
    "matrix": np.uint32([[0, 4]]),
    "str": "0 4",
}
CLAMPS = {"nan": (NAN, 1.0), "inf": (1.0, INF), "negative": (1.0, -1.0), "one": 1.0, "str": "ab"}


def matmul(**changes: Any) -> Any:
    given = dict(rows=ones(4, 16), weights=ones(2, 16, 8), row_offsets=np.uint32([0, 2, 4]))
    return jax.block_until_ready(jax_ep.grouped_matmul(**(given | changes)))


def matmul_gradient(**changes: Any) -> Any:
    given = dict(
        rows=ones(4, 16),
        cotangent=ones(4, 8),
        row_offsets=np.uint32([0, 2, 4]),
        accumulator=ones(2, 16, 8, dtype=f32),
    )
    return jax.block_until_ready(jax_ep.grouped_matmul_gradient(**(given | changes)))


def silu(**changes: Any) -> Any:
    given = dict(x=ones(4, 256), row_offsets=np.uint32([0, 2, 4]))
    return jax.block_until_ready(jax_ep.fused_silu(**(given | changes)))


def mlp(token_format: Any = None, **changes: Any) -> Any:
    group = group_of(token_format)

    def body() -> Any:
        rows = jax_ep.dispatch(group, ones(T, H), ids(T, K))
        given = dict(dispatched=rows, gate_up=ones(L, H, 2 * F), down=ones(L, F, H))
        return jax_ep.expert_mlp(**(given | changes))

    return run(body)


def quantize(**changes: Any) -> Any:
    return jax_ep.quantize_weights(**(dict(weights=ones(L, 128, 128)) | changes))


def dequantize(**changes: Any) -> Any:
    def body() -> Any:
        rows = jax_ep.dispatch(group_of(jax_ep.MXFP8()), ones(T, H), ids(T, K))
        return jax_ep.dequantize(**(dict(dispatched=rows) | changes))

    return run(body)


def add_grouped_matmul() -> None:
    name = "grouped_matmul"
    codes = other_dtypes(4, 16, dtypes=(fp8, np.uint8, i32))
    rows = wrong_arrays(4, 16, dtype=bf16) | codes
    del rows["too long"]
    add_all(name, "rows", rows, matmul)
    add(name, "weights", "rows too long", lambda: matmul(rows=ones(4, 17)))
    weights = wrong_arrays(2, 16, 8, dtype=bf16) | other_dtypes(2, 16, 8, dtypes=(f32, fp8))
    del weights["too long"]
    add_all(name, "weights", weights | {"3 experts": ones(3, 16, 8)}, matmul)
    add_all(name, "row_offsets", OFFSETS, matmul)
    add_all(name, "dtype", {"int32": i32, "float16": jnp.float16, "str": "number"}, matmul)
    add_all(name, "transposed", {"1": 1, "None": None, "str": "no"}, matmul)
    quantized = jax_ep.quantize_weights(ones(2, 128, 128))
    add(name, "rows weights", "codes of weights alone", lambda: matmul(weights=quantized))


def add_grouped_matmul_gradient() -> None:
    name = "grouped_matmul_gradient"
    arrays = {"rows": (4, 16), "cotangent": (4, 8), "accumulator": (2, 16, 8)}
    for argument, shape in arrays.items():
        dtype, other = (f32, bf16) if argument == "accumulator" else (bf16, f32)
        wrong = wrong_arrays(*shape, dtype=dtype) | other_dtypes(*shape, dtypes=(other, fp8, i32))
        if argument != "accumulator":  # others must fit, see below
            del wrong["too long"]
        if argument == "rows":
            del wrong["float32"]
        add_all(name, argument, wrong, matmul_gradient)
    longer, wider = ones(4, 17), ones(4, 9)
    add(name, "accumulator", "rows too long", lambda: matmul_gradient(rows=longer))
    add(name, "accumulator", "cotangent too long", lambda: matmul_gradient(cotangent=wider))
    floats = ones(4, 16, dtype=f32)
    add(name, "cotangent", "rows in float32", lambda: matmul_gradient(rows=floats))
    add_all(name, "row_offsets", OFFSETS, matmul_gradient)
    add_all(name, "transposed", {"1": 1, "None": None}, matmul_gradient)


def add_fused_silu() -> None:
    name = "fused_silu"
    x = wrong_arrays(4, 256, dtype=bf16) | other_dtypes(4, 256, dtypes=(fp8, np.uint8, i32))
    add_all(name, "x", x, silu)
    add_all(name, "row_offsets", OFFSETS, silu)
    add(name, "row_offsets", "beyond the rows", lambda: silu(row_offsets=np.uint32([0, 9])))
    add(name, "row_offsets", "decreasing", lambda: silu(row_offsets=np.uint32([0, 3, 1])))
    add_all(name, "token_format", {"str": "mxfp8", "dtype": fp8, "class": jax_ep.MXFP8}, silu)
    add_all(name, "clamp", CLAMPS, silu)
    add_all(name, "interleaved", {"1": 1, "None": None}, silu)
    add_all(name, "input_scales", {"array": ones(2, dtype=f32), "1": 1.0}, silu)


def add_expert_mlp() -> None:
    name = "expert_mlp"
    for argument, shape in {"gate_up": (L, H, 2 * F), "down": (L, F, H)}.items():
        wrong = wrong_arrays(*shape, dtype=bf16) | other_dtypes(*shape, dtypes=(f32, fp8, i32))
        del wrong["too long"]
        more = {"of all experts": ones(E, *shape[1:]), "half": ones(L, shape[1], shape[2] // 2)}
        add_all(name, argument, wrong | {"one expert": ones(1, *shape[1:])}, mlp)
        add_all(name, argument, more if argument == "gate_up" else {}, mlp)
    add_all(name, "gate_up_bias", {"vector": ones(2 * F), "f32": ones(L, 2 * F, dtype=f32)}, mlp)
    add_all(name, "down_bias", {"vector": ones(H), "fp8": ones(L, H, dtype=fp8)}, mlp)
    add_all(name, "dispatched", {"None": None, "array": ones(T, H)}, mlp)
    add_all(name, "transposed", {"1": 1, "None": None}, mlp)
    add_all(name, "interleaved", {"1": 1, "None": None}, mlp)
    add_all(name, "clamp", CLAMPS, mlp)
    add(name, "gate_up down", "one quantized", lambda: mlp(gate_up=quantize()))


def add_quantize_weights() -> None:
    name = "quantize_weights"
    weights = wrong_arrays(L, 128, 128, dtype=bf16) | other_dtypes(L, 128, 128, dtypes=(fp8, i32))
    del weights["too long"]
    add_all(name, "weights", weights, quantize)
    add(name, "H", "H of 100", lambda: quantize(weights=ones(L, 100, 128)))
    add_all(name, "transposed", {"None": None, "str": "no"}, quantize)
    add_all(name, "differentiable", {"None": None, "str": "no"}, quantize)


def add_dequantize() -> None:
    add_all(
        "dequantize", "dispatched", {"None": None, "array": ones(T, H), "tuple": ()}, dequantize
    )
    add_all("dequantize", "dtype", {"int32": i32, "str": "number", "bool": bool}, dequantize)


def add_experts() -> None:
    for add_some in (
        add_grouped_matmul,
        add_grouped_matmul_gradient,
        add_fused_silu,
        add_expert_mlp,
        add_quantize_weights,
        add_dequantize,
    ):
        add_some()
