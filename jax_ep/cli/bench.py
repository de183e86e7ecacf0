"""`python -m jax_ep bench`: how long a dispatch and a combine take here."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import click
import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError
from rich.console import Console
from rich.table import Table

import jax_ep
from jax_ep.cli import workload

FORMATS: dict[str, Callable[[], jax_ep.TokenFormat]] = {
    "bf16": jax_ep.BF16,
    "f16": lambda: jax_ep.Plain(jnp.float16),
    "f32": lambda: jax_ep.Plain(jnp.float32),
    **{x.name: x for x in (jax_ep.BlockwiseFP8, jax_ep.MXFP8, jax_ep.MXFP4, jax_ep.NVFP4)},
}
_N_WARM_UP = 3
_COUNT = click.IntRange(1)


class Timing(NamedTuple):
    """Seconds of each call, and bytes of the T x K rows that a rank sends in one."""

    name: str
    seconds: list[float]
    n_bytes: int

    def cells(self) -> list[str]:
        """Microseconds: median, min, max; GB/s of the median."""
        median = statistics.median(self.seconds)
        times = (median, min(self.seconds), max(self.seconds))
        gb_per_s = self.n_bytes / median * 1e-9
        return [self.name, *(f"{1e6 * t:.0f}" for t in times), f"{gb_per_s:.2f}"]


@click.command(context_settings={"show_default": True})
@click.option("--tokens", "max_tokens_per_rank", type=_COUNT, default=128, help="T.")
@click.option("--hidden", "hidden_size", type=_COUNT, default=2048, help="H.")
@click.option("--experts", "n_experts", type=_COUNT, default=64, help="E, in total.")
@click.option("--top-k", type=_COUNT, default=8, help="Experts per token.")
@click.option("--ranks", type=_COUNT, help="Devices, virtual on a CPU. [default: all]")
@click.option("--format", "token_format", type=click.Choice(list(FORMATS)), default="bf16")
@click.option("--transport", default="auto", help="auto, xla, host or p2p.")
@click.option("--platform", help="cpu or gpu.  [default: the one JAX prefers]")
@click.option("--repeats", type=_COUNT, default=20, help="Calls measured.")
def bench(
    ranks: int | None,
    token_format: str,
    transport: str,
    platform: str | None,
    repeats: int,
    **sizes: Any,
) -> None:
    """Times one dispatch and one combine, each as a program of its own.

    Every token chooses distinct experts at random. A time runs from the call in Python until all
    ranks have the result.
    """
    try:
        config = jax_ep.EPConfig(**sizes, token_format=FORMATS[token_format]())
        mesh = workload.make_mesh(workload.devices(platform, ranks))
        if config.top_k > config.n_experts:
            raise ValueError(
                f"top-k must be at most experts; got {config.top_k}, {config.n_experts}."
            )
        group = jax_ep.ep_init(mesh, workload.AXIS, config, transport)
    except (ValueError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    with group:
        try:
            timings = measure(mesh, group, repeats)
        except (MemoryError, JaxRuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            raise click.ClickException(
                f"tokens, rows and their copies must fit in memory: {str(error).rstrip('.')}. "
                "Take fewer --tokens, --hidden or --ranks."
            ) from error
    Console().print(_table(group, token_format, timings))


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def _table(group: jax_ep.EPGroup, token_format: str, timings: list[Timing]) -> Table:
    config, device = group.config, group.mesh.devices.flat[0]
    title = (
        f"{group.transport}, {group.n_ranks} x {device.device_kind}, {token_format}: "
        f"T={config.max_tokens_per_rank} H={config.hidden_size} E={config.n_experts} "
        f"K={config.top_k}"
    )
    table = Table("", title=title, caption="GB/s: of the T x K rows of a rank")
    for name in ("median us", "min us", "max us", "GB/s"):
        table.add_column(name, justify="right")
    for timing in timings:
        table.add_row(*timing.cells())
    return table


def measure(mesh: jax.sharding.Mesh, group: jax_ep.EPGroup, repeats: int) -> list[Timing]:
    """Times both calls with random inputs."""
    config = group.config
    choices = workload.random_choices(config, group.n_ranks, seed=0)
    shape = (*choices.shape[:2], config.hidden_size)
    dtype = config.token_format.token_dtypes[0]
    tokens = np.random.default_rng(1).standard_normal(shape, np.float32).astype(dtype)
    operands = workload.place(mesh, tokens), workload.place(mesh, choices)

    def experts(dispatched: jax_ep.Dispatched) -> jax.Array:
        one = dispatched.row_offsets[-1].astype(config.combine_dtype)
        return jnp.broadcast_to(one, (group.max_recv_tokens, config.hidden_size))

    dispatch = workload.on_mesh(mesh, lambda x, ids: jax_ep.dispatch(group, x, ids))
    combine = workload.on_mesh(mesh, lambda rows, d: jax_ep.combine(group, rows, d))
    dispatched = dispatch(*operands)
    expert_out = workload.on_mesh(mesh, experts)(dispatched)
    n_choices = config.max_tokens_per_rank * config.top_k
    sent = n_choices * config.token_format.token_bytes(config.hidden_size)
    returned = n_choices * config.hidden_size * np.dtype(config.combine_dtype).itemsize
    return [
        Timing("dispatch", _seconds(repeats, dispatch, *operands), sent),
        Timing("combine", _seconds(repeats, combine, expert_out, dispatched), returned),
    ]


def _seconds(repeats: int, call: Callable[..., Any], *operands: Any) -> list[float]:
    seconds = []
    for _ in range(_N_WARM_UP + repeats):
        start = time.perf_counter()
        jax.block_until_ready(call(*operands))
        seconds.append(time.perf_counter() - start)
    return seconds[_N_WARM_UP:]
