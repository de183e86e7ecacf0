"""What JAX has no public name for."""

from __future__ import annotations

from typing import Any


def distributed_client() -> Any | None:
    """The client of JAX's distributed runtime; None in a program that has not joined.

    It has `key_value_set_bytes(key, value)` and
    `blocking_key_value_get_bytes(key, timeout_ms)`.
    """
    try:
        from jax._src.distributed import global_state
    except ImportError:
        return None
    return getattr(global_state, "client", None)
