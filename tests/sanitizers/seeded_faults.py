# SPDX-License-Identifier: Apache-2.0
"""Runs the all-to-all of seeded_faults.cc with one fault.

Usage: python seeded_faults.py LIBRARY FAULT

FAULT is one of `FAULTS`. The sanitizer must report every fault of its kind, and nothing
for `none`.
"""

import ctypes
import functools
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

FAULTS = ("none", "overflow", "signed-overflow", "race", "copy-race")
N_RANKS = 4


def register(path):
    """Registers the library's handlers as the package registers its own."""
    library = ctypes.CDLL(path)
    for function in (library.SeededTypeId, library.SeededTypeInfo):
        function.restype = ctypes.c_void_p

    def capsule(pointer):
        return jax.ffi.pycapsule(ctypes.c_void_p(pointer))

    types = {
        "type_id": capsule(library.SeededTypeId()),
        "type_info": capsule(library.SeededTypeInfo()),
    }
    handlers = {
        "instantiate": jax.ffi.pycapsule(library.SeededInstantiate),
        "execute": jax.ffi.pycapsule(library.SeededExecute),
    }
    # Types must be registered before handlers. JAX queues both until a backend
    # exists, and then registers handlers first.
    jax.devices()
    jax.ffi.register_ffi_type("seeded.CallSite", types, platform="cpu")
    jax.ffi.register_ffi_target("seeded_all_to_all", handlers, platform="cpu")


def run(fault):
    """Calls the handler in a chain, mixed with a collective, and in a loop."""
    mesh = jax.make_mesh((N_RANKS,), ("ep",))
    spec = P("ep")

    def exchange(x):
        call = jax.ffi.ffi_call("seeded_all_to_all", jax.ShapeDtypeStruct(x.shape, x.dtype))
        return call(x, n_ranks=np.int64(N_RANKS), fault=np.int64(fault))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def program(x):
        for _ in range(4):
            x = exchange(x) + jax.lax.psum(x, "ep") * 0
        return jax.lax.fori_loop(0, 4, lambda i, x: exchange(x) + 1, x)

    n = N_RANKS * 256
    x = np.arange(N_RANKS * n, dtype=np.float32)
    x = jax.device_put(x, jax.NamedSharding(mesh, spec))
    for _ in range(10):
        y = program(x)
    # Eight exchanges return every element to its place.
    np.testing.assert_array_equal(np.asarray(y), np.asarray(x) + jnp.float32(4))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", N_RANKS)
    if "JAX_EP_TSAN_EDGES" in os.environ:
        import tsan_edges  # noqa: F401
    register(sys.argv[1])
    run(FAULTS.index(sys.argv[2]))
    print("finished", sys.argv[2])
