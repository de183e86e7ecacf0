"""The C++ extension of the host transport: loading and registration with XLA."""

from __future__ import annotations

import functools
from types import ModuleType

import jax


@functools.cache
def load() -> ModuleType:
    """The extension module.

    Raises:
        ImportError: the package was not built.
    """
    from jax_ep import _ffi

    return _ffi


@functools.cache
def register() -> None:
    """Registers the handlers' state type, then the handlers, for platform `cpu`.

    Not at import: before a CPU backend exists, JAX queues both and registers targets
    first, which XLA refuses for handlers with state.
    """
    jax.devices("cpu")
    extension = load()
    jax.ffi.register_ffi_type(
        "jax_ep.CallSite", extension.host_call_site_type(), platform="cpu"
    )
    for name, stages in extension.host_targets().items():
        jax.ffi.register_ffi_target(name, stages, platform="cpu")
