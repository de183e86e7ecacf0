"""The C++ extensions: loading them, and registering their handlers with XLA."""

import functools
import importlib
import pathlib
from types import ModuleType

import jax

_PACKAGE = pathlib.Path(__file__).parent.parent


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
    """Registers the handlers for platform `cpu`, their state type first.

    Not at import: before a CPU backend exists, JAX queues both and registers targets
    before types, which XLA refuses for handlers with state.
    """
    jax.devices("cpu")
    extension = load_host()
    jax.ffi.register_ffi_type("jax_ep.CallSite", extension.call_site_type(), platform="cpu")
    for name, stages in extension.targets().items():
        jax.ffi.register_ffi_target(name, stages, platform="cpu")


@functools.cache
def register_cuda() -> None:
    """Registers the handlers for platform `CUDA`."""
    for name, handler in load_cuda().targets().items():
        jax.ffi.register_ffi_target(name, handler, platform="CUDA")


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
