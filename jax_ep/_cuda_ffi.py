"""The C++ extension of the p2p transport: loading and registration with XLA."""

from __future__ import annotations

import functools
from types import ModuleType

import jax


@functools.cache
def load() -> ModuleType:
    """The extension module.

    Raises:
        ImportError: the package was built without CUDA.
    """
    from jax_ep import _ffi_cuda

    return _ffi_cuda


@functools.cache
def register() -> None:
    """Registers the handlers for platform `CUDA`."""
    for name, handler in load().targets().items():
        jax.ffi.register_ffi_target(name, handler, platform="CUDA")
