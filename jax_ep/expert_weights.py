"""The weights of `expert_mlp`, checked against the rows, so that errors name its arguments."""

from typing import Any

import jax.numpy as jnp

from jax_ep import checks
from jax_ep.formats import QuantizedFormat
from jax_ep.quantize_weights import QuantizedWeights
from jax_ep.results import Dispatched

_NAME = "expert_mlp"
_FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)


def check_arrays(dispatched: Dispatched, gate_up: Any, down: Any, transposed: bool) -> None:
    """Requires `[L, H, 2 F]` and `[L, F, H]`, or both transposed, in the rows' dtype."""
    n_groups, hidden_size = _sizes(dispatched)
    is_quantized = isinstance(dispatched.group.config.token_format, QuantizedFormat)
    dtypes = _FLOATS if is_quantized else (dispatched.tokens.dtype,)

    def check(name: str, weights: Any, n_in: int, letters: tuple[str, str], *dtypes: Any) -> None:
        sizes: tuple[int | None, int | None] = (None, n_in) if transposed else (n_in, None)
        named = " ".join(("L", *(letters[::-1] if transposed else letters)))
        checks.check_array(_NAME, name, weights, (n_groups, *sizes), named, *dtypes)

    check("gate_up", gate_up, hidden_size, ("H", "2F"), *dtypes)
    expert_size = _expert_size(gate_up.shape[1 if transposed else 2])
    check("down", down, expert_size, ("F", "H"), gate_up.dtype)


def check_codes(dispatched: Dispatched, gate_up: QuantizedWeights, down: QuantizedWeights) -> None:
    """Requires the codes of `[L, H, 2 F]` and `[L, F, H]`."""
    n_groups, hidden_size = _sizes(dispatched)
    dtype = jnp.float8_e4m3fn
    shape = n_groups, None, hidden_size
    checks.check_array(_NAME, "gate_up.codes", gate_up.codes, shape, "L 2F H", dtype)
    shape = n_groups, None, _expert_size(gate_up.codes.shape[1])
    checks.check_array(_NAME, "down.codes", down.codes, shape, "L H F", dtype)


def _sizes(dispatched: Dispatched) -> tuple[int, int]:
    """Groups of rows, and elements of a row."""
    token_format = dispatched.group.config.token_format
    is_packed = isinstance(token_format, QuantizedFormat) and token_format.packed
    size = dispatched.tokens.shape[1] * (2 if is_packed else 1)
    return dispatched.row_offsets.shape[0] - 1, size


def _expert_size(n_columns: int) -> int:
    """F, from the columns of `gate_up`."""
    if n_columns % 2:
        raise ValueError(
            f"{_NAME}: gate_up must have as many gate columns as up columns; got {n_columns} "
            "columns."
        )
    return n_columns // 2
