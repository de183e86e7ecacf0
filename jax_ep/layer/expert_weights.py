"""The weights of `expert_mlp`, checked against the rows, so that errors name its arguments."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_ep.exchange import checks
from jax_ep.formats import QuantizedFormat
from jax_ep.formats.plain import FLOATS
from jax_ep.layer.quantize_weights import SCALE_BLOCK, QuantizedWeights
from jax_ep.results import Dispatched


class ExpertWeights(NamedTuple):
    """As given to `expert_mlp`; biases may be None."""

    gate_up: Any
    down: Any
    gate_up_bias: Any
    down_bias: Any


def check_arrays(dispatched: Dispatched, weights: ExpertWeights, transposed: bool) -> None:
    """Requires `[L, H, 2 F]` and `[L, F, H]`, or both transposed, in the rows' dtype."""
    is_quantized = isinstance(dispatched.group.config.token_format, QuantizedFormat)
    dtypes = FLOATS if is_quantized else (dispatched.tokens.dtype,)
    _check(dispatched, weights, transposed, dtypes)


def check_codes(dispatched: Dispatched, weights: ExpertWeights) -> None:
    """Requires codes, with scales, of `[L, H, 2 F]` and `[L, F, H]`, which are transposed."""
    codes = weights._replace(gate_up=weights.gate_up.codes, down=weights.down.codes)
    _check(dispatched, codes, True, (jnp.float8_e4m3fn,), ".codes", jnp.bfloat16)
    call, expert_size = call_name(dispatched), weights.down.codes.shape[2]
    if expert_size % SCALE_BLOCK:
        raise ValueError(
            f"{call}: F must be a multiple of {SCALE_BLOCK}, the size of a block that shares a "
            f"scale, with QuantizedWeights; got {expert_size}."
        )
    _check_quantized(call, "gate_up", weights.gate_up, ("2F", "H"))
    _check_quantized(call, "down", weights.down, ("H", "F"))


def _check_quantized(
    call: str, name: str, weights: QuantizedWeights, letters: tuple[str, str]
) -> None:
    """Requires scales and a source that fit the codes, `[L, N, K]`, which do."""
    (n, k), (n_groups, *sizes) = letters, weights.codes.shape
    shape = n_groups, *(-(-size // SCALE_BLOCK) for size in sizes)
    blocks = f"L {n}/{SCALE_BLOCK} {k}/{SCALE_BLOCK}"
    checks.check_array(call, f"{name}.scales", weights.scales, shape, blocks, jnp.float32)
    if weights.gradient_codes is not None:
        checks.check_array(
            *(call, f"{name}.gradient_codes", weights.gradient_codes),
            *((n_groups, *sizes[::-1]), f"L {k} {n}", jnp.float8_e4m3fn),
        )
    if weights.source is None:
        return
    if not weights.transposed:
        sizes, (n, k) = sizes[::-1], (k, n)
    dtypes = jnp.bfloat16, jnp.float32
    checks.check_array(
        call, f"{name}.source", weights.source, (n_groups, *sizes), f"L {n} {k}", *dtypes
    )


def _check(
    dispatched: Dispatched,
    weights: ExpertWeights,
    transposed: bool,
    dtypes: tuple[Any, ...],
    suffix: str = "",
    bias_dtype: Any = None,
) -> None:
    n_groups, hidden_size = _sizes(dispatched)
    call = call_name(dispatched)

    def check(name: str, x: Any, n_in: int | None, letters: str, *dtypes: Any) -> None:
        sizes = (None, n_in) if transposed else (n_in, None)
        checks.check_array(call, name + suffix, x, (n_groups, *sizes), letters, *dtypes)

    gate_up, down, *_ = weights
    _check_own_experts(dispatched, n_groups, gate_up=gate_up, down=down)
    inner, out = (2, 1) if transposed else (1, 2)
    check("gate_up", gate_up, hidden_size, "L 2F H" if transposed else "L H 2F", *dtypes)
    check("down", down, None, "L H F" if transposed else "L F H", gate_up.dtype)
    _check_expert_size(call, gate_up.shape[out], down.shape[inner])
    sizes = gate_up.shape[out], down.shape[out]
    _check_biases(call, weights, n_groups, sizes, bias_dtype or gate_up.dtype)


def _check_own_experts(dispatched: Dispatched, n_groups: int, **weights: Any) -> None:
    """Requires weights of this rank's experts: those of all ranks are the usual mistake."""
    group, call = dispatched.group, call_name(dispatched)
    n_experts = group.config.n_experts
    for name, x in weights.items():
        if x is not None and x.ndim == 3 and x.shape[0] == n_experts != n_groups:
            raise ValueError(
                f"{call}: {name} must have this rank's experts, L={n_groups}; got {n_experts}, "
                f"those of all ranks. Shard its first axis: jax.P({group.axis_name!r}) in in_specs "
                "of jax.shard_map."
            )


def _check_biases(
    call: str, weights: ExpertWeights, n_groups: int, sizes: tuple[int, int], dtype: Any
) -> None:
    """Requires `[L, 2 F]` and `[L, H]`, in the dtype of the matmuls' results."""
    biases = {"gate_up_bias": weights.gate_up_bias, "down_bias": weights.down_bias}
    for (name, bias), size, letters in zip(biases.items(), sizes, ("L 2F", "L H"), strict=True):
        if bias is not None:
            checks.check_array(call, name, bias, (n_groups, size), letters, dtype)


def call_name(dispatched: Dispatched) -> str:
    """`expert_mlp`, as messages name it."""
    return dispatched.group.geometry.call("expert_mlp")


def _sizes(dispatched: Dispatched) -> tuple[int, int]:
    """Groups of rows of this rank's experts, and elements of a row."""
    token_format = dispatched.group.config.token_format
    is_packed = isinstance(token_format, QuantizedFormat) and token_format.packed
    size = dispatched.tokens.shape[1] * (2 if is_packed else 1)
    n_groups = dispatched.row_offsets.shape[0] - 1 - dispatched.group.config.expert_copies
    return n_groups, size


def _check_expert_size(call: str, n_columns: int, n_rows: int) -> None:
    """Requires one F: `gate_up` has 2 F columns, `down` has F rows."""
    if n_columns == 2 * n_rows:
        return
    if n_columns == n_rows:
        raise ValueError(
            f"{call}: gate_up must have the columns of gate and up, 2F={2 * n_rows}, for the "
            f"F={n_rows} rows of down; got {n_columns}, those of one of them."
        )
    if n_columns % 2:
        raise ValueError(
            f"{call}: gate_up must have as many gate columns as up columns; got {n_columns} "
            "columns."
        )
    raise ValueError(
        f"{call}: gate_up and down must be of one F: gate_up has 2F={n_columns} columns, so "
        f"F={n_columns // 2}; down has F={n_rows} rows."
    )
