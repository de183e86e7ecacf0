"""Dispatch in the package's token formats: times, and bytes on the wire."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError

import jax_ep
import numpy_truth
from gpu import programs, trace
from gpu.contestants import AXIS
from gpu.measure import KERNELS, Arena, breaks_devices, kernel_times

FORMATS = {
    "bf16": jax_ep.BF16,
    "blockwise_fp8": jax_ep.BlockwiseFP8,
    "mxfp8": jax_ep.MXFP8,
    "mxfp4": jax_ep.MXFP4,
    "nvfp4": jax_ep.NVFP4,
}

#: Least cosine of rows and tokens; the tests compare bits.
_LEAST_COSINE = 0.97
#: As in C++: what a choice takes of a message, and what messages are multiples of.
_CHOICE_BYTES, _MESSAGE_BYTES = 16, 128


def measure(arena: Arena, name: str, transport: str) -> dict[str, Any]:
    """Of calls one after the other, each with inputs that are not in the cache.

    Returns:
        JSON, see README.md; under `"failed"` what went wrong.
    """
    token_format, case = FORMATS[name](), arena.case
    config = jax_ep.EPConfig(
        n_experts=case.n_experts,
        top_k=case.top_k,
        hidden_size=case.hidden_size,
        max_tokens_per_rank=case.n_tokens,
        token_format=token_format,
        recv_capacity=_capacity(arena, token_format),
    )
    n_bytes = message_bytes(token_format, case.hidden_size, case.top_k)
    result: dict[str, Any] = {
        "failed": [],
        "token_format": name,
        "token_bytes": token_format.token_bytes(case.hidden_size),
        "message_bytes": n_bytes,
        "bytes_off_the_gpu": round(arena.traffic["remote_messages"] * n_bytes),
    }
    try:
        with jax_ep.ep_init(arena.mesh, AXIS, config, transport=transport) as group:
            _check(arena, group)
            result["dispatch"] = _times(arena, group)
    except (AssertionError, JaxRuntimeError, ValueError, trace.TraceError) as error:
        result["failed"].append(str(error)[:2000])
        result["is_fatal"] = breaks_devices(error)
        return result
    ns = result["dispatch"]["median_us"] * 1e3
    sent = arena.traffic["remote_messages"] * result["token_bytes"]
    result["dispatch"]["physical_gb_s"] = round(result["bytes_off_the_gpu"] / ns, 1)
    result["dispatch"]["logical_gb_s"] = round(sent / ns, 1)
    return result


def message_bytes(token_format: jax_ep.TokenFormat, hidden: int, top_k: int) -> int:
    """What travels per token and rank: scales, payload, choices, padding."""
    payload = token_format.payload_bytes(hidden)
    scales = token_format.token_bytes(hidden) - payload
    n_bytes = -(-scales // 16) * 16 + payload + top_k * _CHOICE_BYTES
    return -(-n_bytes // _MESSAGE_BYTES) * _MESSAGE_BYTES


def _capacity(arena: Arena, token_format: jax_ep.TokenFormat) -> int:
    """As in the other measurements, and the padding of groups."""
    case, alignment = arena.case, token_format.layout.row_alignment
    rows = case.n_rows + (alignment - 1) * case.n_experts // case.n_ranks
    return rows // alignment * alignment


def _check(arena: Arena, group: jax_ep.EPGroup) -> None:
    """Counts are those of the tokens; sums of all rows are near those of the tokens."""

    def run(tokens: Any, ids: Any, _: Any) -> Any:
        rows = jax_ep.dispatch(group, tokens, ids)
        numbers = rows.tokens
        if group.config.token_format.scale_dtype is not None:
            numbers = jax_ep.dequantize(rows, jnp.float32)
        in_use = rows.src_info[:, :1] >= 0
        in_use &= jnp.arange(numbers.shape[0])[:, None] < rows.row_offsets[-1].astype(
            jnp.int32
        )
        total = jnp.where(in_use, numbers.astype(jnp.float32), 0).sum(0)
        sent = ids.shape[1] * tokens.astype(jnp.float32)
        sums = jax.lax.psum(jnp.stack([total, sent.sum(0)]), AXIS)
        return sums[None], rows.n_dropped[None]

    args = arena.sets[0]
    sums, dropped = programs.on_mesh(arena.mesh, run)(*args)
    got, wanted = numpy_truth.shard(sums, 0)
    cosine = float(got @ wanted / np.linalg.norm(got) / np.linalg.norm(wanted))
    assert cosine >= _LEAST_COSINE, f"rows must be near the tokens; cosine {cosine:.4f}"
    assert not np.asarray(dropped).any(), "no row may be dropped"


def _times(arena: Arena, group: jax_ep.EPGroup) -> dict[str, Any]:
    """Of the kernel, over all GPUs and calls but the first."""

    def run(sets: list[tuple[jax.Array, ...]]) -> jax.Array:
        zero = jnp.int32(0)
        for tokens, ids, _ in sets:
            zero = jax_ep.dispatch(group, tokens, ids + zero).n_dropped
        return zero[None]

    function = programs.on_mesh(arena.mesh, run)
    jax.block_until_ready([function(arena.sets), function(arena.sets)])
    repeats = arena.effort.repeats

    def run_often() -> None:
        for _ in range(repeats):
            trace.pause()
            arena.flush()
            trace.pause()
            jax.block_until_ready(function(arena.sets))

    calls = [gpu[1::2] for gpu in trace.calls_of(2 * repeats, run_often)]
    times = kernel_times(calls, KERNELS["dispatch"], len(arena.sets))
    return trace.summary([us for call in times for us in call[1:]])
