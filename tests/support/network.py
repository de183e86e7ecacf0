"""The network of this process where it runs with `rigs/rate_shim.cc`: what it sends, and how fast.

The shim counts all of the process's TCP: besides NVSHMEM's UCX also the job's own messages.
"""

import ctypes

_process = ctypes.CDLL(None)


def sent_bytes() -> int:
    """All bytes that this process has sent so far."""
    function = _process.jax_ep_sent_bytes
    function.restype = ctypes.c_uint64
    return function()


def limit_rate(bytes_per_s: float) -> None:
    """From now on, this process sends at most so many bytes per second; 0: any number."""
    _process.jax_ep_limit_send_rate(ctypes.c_double(bytes_per_s))
