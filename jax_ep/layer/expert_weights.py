"""The weights of `expert_mlp`, checked against the rows, so that errors name its arguments."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_ep.formats import QuantizedFormat
from jax_ep.operands import checks
from jax_ep.results import Dispatched

_FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)


class ExpertWeights(NamedTuple):
    """As given to `expert_mlp`; biases may be None."""

    gate_up: Any
    down: Any
    gate_up_bias: Any
    down_bias: Any


def check_arrays(dispatched: Dispatched, weights: ExpertWeights, transposed: bool) -> None:
    """Requires `[L, H, 2 F]` and `[L, F, H]`, or both transposed, in the rows' dtype."""
    n_groups, hidden_size = _sizes(dispatched)
    call = call_name(dispatched)
    is_quantized = isinstance(dispatched.group.config.token_format, QuantizedFormat)
    dtypes = _FLOATS if is_quantized else (dispatched.tokens.dtype,)

    def check(name: str, x: Any, n_in: int | None, letters: tuple[str, str], *dtypes: Any) -> None:
        sizes = (None, n_in) if transposed else (n_in, None)
        named = " ".join(("L", *(letters[::-1] if transposed else letters)))
        checks.check_array(call, name, x, (n_groups, *sizes), named, *dtypes)

    gate_up, down, *_ = weights
    _check_own_experts(dispatched, n_groups, gate_up=gate_up, down=down)
    inner, out = (2, 1) if transposed else (1, 2)
    check("gate_up", gate_up, hidden_size, ("H", "2F"), *dtypes)
    check("down", down, None, ("F", "H"), gate_up.dtype)
    _check_expert_size(call, gate_up.shape[out], down.shape[inner])
    _check_biases(call, weights, n_groups, (gate_up.shape[out], down.shape[out]), gate_up.dtype)


def check_codes(dispatched: Dispatched, weights: ExpertWeights) -> None:
    """Requires the codes of `[L, H, 2 F]` and `[L, F, H]`."""
    n_groups, hidden_size = _sizes(dispatched)
    call = call_name(dispatched)
    gate_up, down = weights.gate_up.codes, weights.down.codes
    dtype = jnp.float8_e4m3fn
    _check_own_experts(dispatched, n_groups, gate_up=gate_up, down=down)
    shape = n_groups, None, hidden_size
    checks.check_array(call, "gate_up.codes", gate_up, shape, "L 2F H", dtype)
    checks.check_array(call, "down.codes", down, (n_groups, None, None), "L H F", dtype)
    _check_expert_size(call, gate_up.shape[1], down.shape[2])
    _check_biases(call, weights, n_groups, (gate_up.shape[1], down.shape[1]), jnp.bfloat16)


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
    """Groups of rows, and elements of a row."""
    token_format = dispatched.group.config.token_format
    is_packed = isinstance(token_format, QuantizedFormat) and token_format.packed
    size = dispatched.tokens.shape[1] * (2 if is_packed else 1)
    return dispatched.row_offsets.shape[0] - 1, size


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
