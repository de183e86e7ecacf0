"""Plain: tokens travel unquantized."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_ep.formats.base import TokenFormat

FLOATS = tuple(np.dtype(t) for t in (jnp.bfloat16, jnp.float16, jnp.float32))


def as_dtype(value: Any) -> np.dtype | None:
    """The dtype that `value` names; None if it names none."""
    try:
        return None if value is None else np.dtype(value)
    except TypeError:
        return None


def sum_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype in which sums of numbers of `dtype` travel between ranks.

    float16 becomes float32: part of a sum may exceed float16's range, although the sum does not.
    """
    return np.dtype(np.float32) if dtype == np.float16 else np.dtype(dtype)


@dataclasses.dataclass(frozen=True)
class Plain(TokenFormat):
    """Tokens travel unquantized.

    Attributes:
        dtype: bfloat16, float16 or float32.

    Raises:
        ValueError: another dtype.
    """

    dtype: np.dtype

    def __post_init__(self) -> None:
        dtype = as_dtype(self.dtype)
        if dtype not in FLOATS:
            got = self.dtype if dtype is None else dtype.name
            raise ValueError(
                f"Plain carries bfloat16, float16 or float32; got dtype={got}. Cast the tokens, or "
                "name one of these."
            )
        object.__setattr__(self, "dtype", dtype)

    @property
    def name(self) -> str:
        """`plain_` and the dtype's name."""
        return f"plain_{self.dtype.name}"

    @property
    def token_dtypes(self) -> tuple[np.dtype, ...]:
        """The dtype itself."""
        return (self.dtype,)

    @property
    def row_dtype(self) -> np.dtype:
        """The dtype itself."""
        return self.dtype

    @property
    def returns_gradient(self) -> bool:
        """Unless sums of the dtype travel in another."""
        return sum_dtype(self.dtype) == self.dtype


def BF16() -> Plain:  # noqa: N802 (named like the other formats)
    """The format of bfloat16 tokens: `Plain(jnp.bfloat16)`."""
    return Plain(np.dtype(jnp.bfloat16))
