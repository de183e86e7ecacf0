"""The C++ extensions: loading them, and registering their handlers with XLA."""

import functools
import importlib
import importlib.util
import logging
import pathlib
from types import ModuleType

import jax

_PACKAGE = pathlib.Path(__file__).parent.parent
_CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_log = logging.getLogger("jax_ep")


@functools.cache
def load_host() -> ModuleType:
    """The extension for CPU devices; raises ImportError if it was not built."""
    return importlib.import_module("jax_ep._ffi")


def has_host() -> bool:
    """Whether the extension for CPU devices can be loaded."""
    try:
        load_host()
    except ImportError:
        return False
    return True


@functools.cache
def load_cuda() -> ModuleType:
    """The extension for CUDA devices; raises ImportError if it was not built."""
    return importlib.import_module("jax_ep._ffi_cuda")


@functools.cache
def register_host() -> None:
    """Registers the handlers for platform `cpu`; JAX queues them until there is a backend."""
    for name, stages in load_host().targets().items():
        jax.ffi.register_ffi_target(name, stages, platform="cpu")


@functools.cache
def register_cuda() -> None:
    """Registers the handlers for platform `CUDA`."""
    for name, handler in load_cuda().targets().items():
        jax.ffi.register_ffi_target(name, handler, platform="CUDA")


def register_what_is_here() -> None:
    """Registers the handlers at import, so that a loaded program runs without an `ep_init`.

    Starts no backend and never raises: what is missing here, `ep_init` and the other calls explain.
    The extension for CUDA is loaded only where JAX has a plugin for it, as it takes longer.
    """
    registrations = {"_ffi": register_host}
    if any(importlib.util.find_spec(name) for name in _CUDA_PLUGINS):
        registrations["_ffi_cuda"] = register_cuda
    for name, register in registrations.items():
        try:
            register()
        except ImportError as error:
            _log.debug("Custom calls are not registered: %s", why_missing(name, error))


def why_missing(name: str, error: ImportError, package: pathlib.Path = _PACKAGE) -> str:
    """Explains to a user why `jax_ep.<name>` cannot be loaded, and what to do.

    `python -m` and `python -c` search the working directory first, so inside a clone they find the
    sources, which have no extensions, before an installed package.
    """
    why = f"the extension jax_ep.{name} cannot be loaded: {error}"
    if (package.parent / "pyproject.toml").exists():
        why += (
            f". {package} holds the sources. If the package is installed elsewhere, run from "
            "another directory; or install it with pip install --editable ."
        )
    elif name == "_ffi_cuda" and isinstance(error, ModuleNotFoundError):
        why += (
            ". jax_ep was built for CPUs alone. Install it again with pip's options "
            "--force-reinstall --no-deps --no-cache-dir -C cmake.define.JAX_EP_CUDA=ON"
        )
    return why
