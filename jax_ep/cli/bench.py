"""`python -m jax_ep bench`: how long a dispatch and a combine take here."""

import contextlib
from collections.abc import Iterator
from typing import Any

import click
from jax.errors import JaxRuntimeError
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jax_ep
from jax_ep.cli import workload
from jax_ep.cli.timing import Tick, Timing, measure, n_calls
from jax_ep.formats import FORMATS

_COUNT = click.IntRange(1)


@click.command(context_settings={"show_default": True})
@click.option("--tokens", "max_tokens_per_rank", type=_COUNT, default=128, help="T.")
@click.option("--hidden", "hidden_size", type=_COUNT, default=2048, help="H.")
@click.option("--experts", "n_experts", type=_COUNT, default=64, help="E, in total.")
@click.option("--top-k", type=_COUNT, default=8, help="Experts per token.")
@click.option("--ranks", type=_COUNT, help="Devices, virtual on a CPU. [default: all]")
@click.option("--format", "token_format", type=click.Choice(list(FORMATS)), default="bf16")
@click.option("--transport", default="auto", help="auto, xla, host or p2p.")
@click.option("--platform", help="cpu or gpu.  [default: the one JAX prefers]")
@click.option("--expert-size", type=_COUNT, help="F: times a layer of such experts, too.")
@click.option("--repeats", type=_COUNT, default=20, help="Calls measured.")
def bench(
    ranks: int | None,
    token_format: str,
    transport: str,
    platform: str | None,
    expert_size: int | None,
    repeats: int,
    **sizes: Any,
) -> None:
    """Times one dispatch and one combine, each as a program of its own.

    With --expert-size, also a layer: dispatch, the experts' gated network and combine in one
    program, without and with the gradients of tokens and weights.

    Every token chooses distinct experts at random. A time runs from the call in Python until all
    ranks have the result.
    """
    try:
        config = jax_ep.EPConfig(**sizes, token_format=FORMATS[token_format]())
        found = workload.devices(platform, ranks)
        mesh = workload.make_mesh(found)
        group = jax_ep.ep_init(mesh, workload.AXIS, config, transport)
    except (ValueError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    with group:
        try:
            with _progress(n_calls(repeats, expert_size)) as tick:
                timings = measure(mesh, group, repeats, expert_size, tick)
        except (MemoryError, JaxRuntimeError) as error:
            if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise click.ClickException(
                f"tokens, rows and their copies must fit in memory: {str(error).rstrip('.')}. "
                "Take fewer --tokens, --hidden or --ranks."
            ) from error
    console = Console()
    console.print(_table(group, token_format, expert_size, timings))
    if ranks is None and (advice := workload.advice(found)):
        console.print(advice)


@contextlib.contextmanager
def _progress(n_calls: int) -> Iterator[Tick]:
    """Shows a bar on a terminal; what it returns draws it, and is to be called before each call.

    No thread draws it, which would disturb the calls.
    """
    console = Console(stderr=True)
    is_hidden = not console.is_terminal
    with Progress(
        console=console, auto_refresh=False, transient=True, disable=is_hidden
    ) as progress:
        task = progress.add_task("", total=n_calls)
        yield lambda name: progress.update(
            task, advance=1, description=f"{name:16}", refresh=not is_hidden
        )


def _table(
    group: jax_ep.EPGroup, token_format: str, expert_size: int | None, timings: list[Timing]
) -> Table:
    config, device = group.config, group.mesh.devices.flat[0]
    title = (
        f"{group.transport}, {group.n_ranks} x {device.device_kind}, {token_format}: "
        f"T={config.max_tokens_per_rank} H={config.hidden_size} E={config.n_experts} "
        f"K={config.top_k}" + ("" if expert_size is None else f" F={expert_size}")
    )
    table = Table("", title=title, caption="GB/s: of the T x K rows of a rank")
    for name in ("median us", "min us", "max us", "GB/s"):
        table.add_column(name, justify="right")
    for timing in timings:
        table.add_row(*timing.cells())
    return table
