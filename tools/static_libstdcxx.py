# SPDX-License-Identifier: Apache-2.0
"""Checks the extensions with a libstdc++ of their own, beside that of the process.

Usage: python tools/static_libstdcxx.py

So are extensions whose compiler links libstdc++ statically; ffi/exports.cmake says what goes wrong
unless they export PyInit_* alone. Links the objects of the editable install a second time, with
-static-libstdc++, in a second, loads the result after jaxlib, and asks for errors. If symbols are
bound to the wrong libstdc++, texts break off at the first number, or the process crashes. Needs no
GPU.
"""

import faulthandler
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import smoke_test

from jax_ep.ffi import extension

_PROJECT = Path(__file__).parent.parent


def main() -> None:
    """Runs the checks; each prints a line."""
    faulthandler.enable()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 16)  # before jaxlib 0.12, two threads per device
    folder = link(build_folder())
    if "/libstdc++.so" not in Path("/proc/self/maps").read_text():
        raise SystemExit("The process must have a libstdc++.so before the extensions are loaded.")
    host = load(folder, "_ffi")
    extension.register_host()
    check_exceptions(lambda: host.stats("missing", 0, 0))
    check_wrong_attributes("jax_ep_dispatch")
    check_wrong_attributes("jax_ep_fused_silu")
    smoke_test.check_round_trip(jax.devices()[:8], "host")
    if importlib.util.find_spec("jax_ep._ffi_cuda") is None:
        print("static-libstdcxx: not run for _ffi_cuda, which was not built")
        return
    cuda = load(folder, "_ffi_cuda")
    check_exceptions(lambda: cuda.stats("missing", 0))
    check_failure_text(cuda)
    # XLA decodes attributes before anything of the handler runs, so this one may be a CPU's.
    jax.ffi.register_ffi_target("cuda_check", cuda.targets()["jax_ep_check"], platform="cpu")
    check_wrong_attributes("cuda_check")


def build_folder() -> Path:
    """Where the editable install was built."""
    installed = Path(importlib.util.find_spec("jax_ep._ffi").origin)
    built = list(_PROJECT.glob(f"build/editable-*/{installed.name}"))
    if not built:
        raise SystemExit(f"{installed} must be an editable install: run `make setup` first.")
    return max(built, key=lambda path: path.stat().st_mtime).parent


def link(build: Path) -> Path:
    """Links the extensions with a static libstdc++; returns the folder."""
    cmake = shutil.which("cmake", path=Path(sys.executable).parent) or "cmake"
    subprocess.run([cmake, "--build", build, "--target", "static_libstdcxx"], check=True)
    return build / "static_libstdcxx"


def load(folder: Path, name: str) -> ModuleType:
    """Loads an extension of `folder` as that of the package."""
    (path,) = folder.glob(f"{name}.*")
    if b"libstdc++.so" in path.read_bytes():
        raise SystemExit(f"{path} must contain libstdc++; it needs libstdc++.so.")
    spec = importlib.util.spec_from_file_location(f"jax_ep.{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[spec.name] = module
    return module


def check_exceptions(call: Callable[[], object]) -> None:
    """An exception of the extension becomes one of Python."""
    try:
        call()
    except ValueError as error:
        expect(str(error), "group missing is not open")
    else:
        raise SystemExit("A query of a group that is not open must raise ValueError.")


def check_failure_text(cuda: ModuleType) -> None:
    """The error of a rank of p2p whose peer does not answer, which has a float in it."""
    config = cuda.GroupConfig(
        n_ranks=4,
        n_ranks_per_node=4,
        n_local_groups=2,
        n_choices=2,
        max_tokens_per_rank=16,
        row_alignment=1,
        n_source_nodes=1,
        row_bytes=64,
        n_sms=0,
        timeout_s=0.5,
    )
    phase, peer, epoch = 1, 3, 7  # Failure in ffi/p2p/launch/call_args.h
    text = cuda.failure_text(config=config, rank=2, word=epoch << 32 | peer << 8 | phase)
    expect(text, r"rank 2 waited 0\.5 s for rank 3 \(dispatch: its counts, epoch 7\)")


def check_wrong_attributes(target: str) -> None:
    """The error that XLA's headers in the extension print by streams."""
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((), jnp.int32))
    attributes = dict(one=np.int32(1), two=np.int32(2))
    try:
        jax.block_until_ready(jax.jit(lambda x: call(x, **attributes))(jnp.int32(0)))
    except jax.errors.JaxRuntimeError as error:
        expect(str(error), r"Wrong number of attributes: expected \d+ .*but got 2\b")
    else:
        raise SystemExit(f"{target} must refuse attributes that it does not know.")


def expect(text: str, pattern: str) -> None:
    """Prints the text, which must contain the pattern."""
    if not re.search(pattern, text):
        raise SystemExit(f"An error must match {pattern!r}; got {text!r}.")
    print("error, as expected:", " ".join(text.split())[:160])


if __name__ == "__main__":
    main()
