"""The only module that uses parts of JAX that have no public name."""

from typing import Any


def distributed_client() -> Any | None:
    """The client of JAX's distributed runtime; None if the process has not joined it.

    processes/messages.py has what it is used for.
    """
    try:
        from jax._src.distributed import global_state
    except ImportError:
        return None
    return getattr(global_state, "client", None)
