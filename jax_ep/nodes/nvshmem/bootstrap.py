"""NVSHMEM in this process: its library, its world, and the heaps that all processes have in common.

NVSHMEM knows one world per process, of all processes and one GPU each. What it allocates, it
allocates in all of them at once, so heaps are kept and used again.
"""

import importlib.util
import json
import os
import pathlib
import queue
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from jax_ep.ffi import extension
from jax_ep.processes import interrupts
from jax_ep.processes.exchange import Exchange
from jax_ep.processes.messages import has_types, sent_json

T = TypeVar("T")

# In place of the job's id, from a process that has joined.
_JOINED = b"joined"
# The first version whose layout of IBGDA's queues differs from the kernels'.
_NEW_IBGDA = (3, 5, 19)
# NVSHMEM's collectives, which would use these, are not used.
_ENVIRONMENT = {"NVSHMEM_DISABLE_NCCL": "1", "NVSHMEM_DISABLE_NVLS": "1"}
# The least time limit of NVSHMEM's steps, in seconds. The first step loads its libraries.
# Tests lower it.
min_step_s = 60.0
# Why NVSHMEM is of no use to this process any more, if so.
_unfinished: str | None = None


def why_missing() -> str | None:
    """Why this process has no NVSHMEM that the kernels can use; None if it has."""
    if _unfinished is not None:
        return _unfinished
    try:
        nvshmem = getattr(extension.load_cuda(), "nvshmem", None)
    except ImportError as error:
        return extension.why_missing("_ffi_cuda", error)
    if nvshmem is None:
        return (
            "jax_ep was built without NVSHMEM. Build it again with nvidia-nvshmem-cu13 (or -cu12, "
            "with nvcc of CUDA 12) in the build environment."
        )
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        loaded = version()
    except RuntimeError as error:
        return str(error)
    uses_ibgda = os.environ.get("NVSHMEM_IB_ENABLE_IBGDA", "0").lower() not in ("0", "false", "no")
    if uses_ibgda and tuple(map(int, loaded.split("."))) >= _NEW_IBGDA:
        return (
            f"NVSHMEM_IB_ENABLE_IBGDA needs NVSHMEM before {'.'.join(map(str, _NEW_IBGDA))}, whose "
            f"queues the kernels know; got {loaded}. Unset it, or install an older version."
        )
    return None


def version() -> str:
    """The version of NVSHMEM's host library; raises RuntimeError if there is none to use."""
    return str(load().load(_library()))


def _library() -> str:
    """NVSHMEM's host library: that of its wheel, or what the system finds."""
    name = "libnvshmem_host.so.3"
    try:
        spec = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:
        spec = None
    folders = list(spec.submodule_search_locations or []) if spec else []
    paths = [pathlib.Path(folder, "lib", name) for folder in folders]
    return str(next((path for path in paths if path.exists()), name))


def load() -> ModuleType:
    """The part of the extension for CUDA that uses NVSHMEM."""
    return extension.load_cuda().nvshmem


def join(nvshmem: ModuleType, exchange: Exchange, device: int) -> None:
    """Joins NVSHMEM's world, once per process, with a CUDA ordinal.

    All processes are here: they have just exchanged the id.
    """
    is_first = exchange.process == exchange.processes[0]

    def offer() -> bytes:
        if nvshmem.has_joined():
            return _JOINED
        return nvshmem.make_id() if is_first else b""

    answers = exchange.gather("nvshmem id", offer)
    n_joined = answers.count(_JOINED)
    if n_joined == len(answers):
        return
    if n_joined > 0:
        raise RuntimeError(
            f"NVSHMEM is initialized in {n_joined} of {len(answers)} processes. An earlier ep_init "
            "must have failed in the others; restart the job."
        )

    def join_here() -> bytes:
        arguments = answers[0], exchange.process, len(exchange.processes), device
        _run_step(exchange, "initialization", lambda: nvshmem.join(*arguments))
        return b""

    exchange.gather("nvshmem joined", join_here, _limit_s(exchange))


def find_heap(nvshmem: ModuleType, exchange: Exchange, key: str, n_bytes: int) -> int:
    """The number of a heap that all processes can use: an old one, or a new one."""

    def offer() -> bytes:
        pinned = nvshmem.pinned(key)
        kept = [pinned] if pinned >= 0 else []
        return json.dumps([kept, nvshmem.free(n_bytes)]).encode()

    answers = exchange.gather("heaps", offer)
    offers = [sent_json(i, each, _is_offer, "its list of heaps") for i, each in enumerate(answers)]
    common = set.intersection(*({*kept, *free} for kept, free in offers))
    pinned = common & {number for kept, _ in offers for number in kept}
    if common:
        return min(pinned or common)

    def allocate() -> bytes:
        number = _run_step(exchange, "allocation of memory", lambda: nvshmem.allocate(n_bytes))
        return str(number).encode()

    numbers = exchange.gather("heap", allocate, _limit_s(exchange))
    if len(set(numbers)) > 1:
        found = ", ".join(each.decode(errors="replace") for each in numbers)
        raise RuntimeError(
            f"NVSHMEM's heaps have different numbers in different processes: {found}. An earlier "
            "ep_init must have failed in some of them only; restart the job."
        )
    return int(numbers[0])


def drain(key: str, limit_s: float) -> str | None:
    """Waits until what this process has sent over a closed rail has arrived; else the reason.

    NVSHMEM's own wait, in a kernel, has no time limit, and whatever waits for the device may wait
    for that kernel. So NVSHMEM is then of no use to this process.
    """
    global _unfinished
    if load().drain(key, limit_s):
        return None
    _unfinished = (
        f"NVSHMEM has not confirmed within {limit_s:g} s that what this process sent before it "
        "closed a group has arrived. Restart the job."
    )
    return _unfinished


def _is_offer(x: Any) -> bool:
    """The heaps that a process has kept for a key, and those that are free."""
    return has_types(x, list, list) and all(type(number) is int for each in x for number in each)


def _limit_s(exchange: Exchange) -> float:
    """Time limit of a step of NVSHMEM's: that of the group, or a minute if that is less."""
    return max(exchange.timeout_s, min_step_s)


def _run_step(exchange: Exchange, step: str, run: Callable[[], T]) -> T:
    """Runs a step of NVSHMEM's, which waits for all processes and has no time limit of its own.

    Raises TimeoutError once _limit_s has passed. Nothing can end the step, so NVSHMEM is of no use
    to this process from then on; nor is it after an interrupt.
    """
    global _unfinished
    limit_s = _limit_s(exchange)
    results: queue.Queue[T | BaseException] = queue.Queue()

    def work() -> None:
        try:
            results.put(run())
        except BaseException as error:
            results.put(error)

    threading.Thread(target=work, name=f"NVSHMEM's {step}", daemon=True).start()
    try:
        with interrupts.allowed():
            result = results.get(timeout=limit_s)
    except queue.Empty:
        _unfinished = (
            f"NVSHMEM's {step} has not ended within {limit_s:g} s. It waits for all processes: one "
            "of them may have died. Restart the job."
        )
        raise TimeoutError(_unfinished) from None
    except BaseException:
        _unfinished = f"NVSHMEM's {step} was interrupted. Restart the job."
        raise
    if isinstance(result, BaseException):
        raise result
    return result
