# SPDX-License-Identifier: Apache-2.0
"""Pytest plugin: registers handlers through the trampolines of tsan_edges.cc.

`make sanitize` loads it with `-p tsan_edges`. The environment variable
JAX_EP_TSAN_EDGES names the library.
"""

import ctypes
import importlib.util
import os
import pathlib

# Load the extensions before TSan first looks up a function's name: it does not find
# names in libraries that are loaded later.
_package = importlib.util.find_spec("jax_ep").submodule_search_locations[0]
for _extension in pathlib.Path(_package).glob("*.so"):
    ctypes.CDLL(str(_extension))

import jax  # noqa: E402

_python = ctypes.PyDLL(None)  # not ctypes.pythonapi: jax.ffi changes its prototypes
_capsule_name = _python.PyCapsule_GetName
_capsule_name.restype = ctypes.c_char_p
_capsule_name.argtypes = [ctypes.py_object]
_capsule_pointer = _python.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_new_capsule = _python.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

_edges = ctypes.CDLL(os.environ["JAX_EP_TSAN_EDGES"])
for _function in (_edges.TsanEdgesWrapHandler, _edges.TsanEdgesWrapType):
    _function.restype = ctypes.c_void_p
    _function.argtypes = [ctypes.c_void_p]


def _wrap(capsule, wrapper):
    pointer = wrapper(_capsule_pointer(capsule, _capsule_name(capsule)))
    if pointer is None:
        raise RuntimeError("too many handlers or types for tsan_edges.cc")
    return _new_capsule(pointer, None, None)


def _install():
    register_target = jax.ffi.register_ffi_target
    register_type = jax.ffi.register_ffi_type

    def register_ffi_target(name, fn, *args, **kwargs):
        if isinstance(fn, dict):
            fn = {k: _wrap(v, _edges.TsanEdgesWrapHandler) for k, v in fn.items()}
        else:
            fn = _wrap(fn, _edges.TsanEdgesWrapHandler)
        return register_target(name, fn, *args, **kwargs)

    def register_ffi_type(name, obj, *args, **kwargs):
        obj = dict(obj)
        if obj.get("type_info") is not None:
            obj["type_info"] = _wrap(obj["type_info"], _edges.TsanEdgesWrapType)
        return register_type(name, obj, *args, **kwargs)

    jax.ffi.register_ffi_target = register_ffi_target
    jax.ffi.register_ffi_type = register_ffi_type


_install()
