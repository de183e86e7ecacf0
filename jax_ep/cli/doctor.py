"""`python -m jax_ep doctor`: what this machine has, and which transports work on it."""

import platform
from collections.abc import Sequence
from importlib import metadata

import click
import jax
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import jax_ep
from jax_ep.cli import links, probe, workload
from jax_ep.xla_ffi import extension

_GIB = 1 << 30


@click.command()
@click.option("--ranks", type=click.IntRange(1), help="Devices to use; default: all.")
@click.option("--platform", "backend", help="cpu or gpu; default: the one JAX prefers.")
@click.option("--links/--no-links", "with_links", default=True, help="Measure copies.")
def doctor(ranks: int | None, backend: str | None, with_links: bool) -> None:
    """Shows versions, devices, links and transports.

    Asks every transport whether it can serve the devices, and sends a few tokens there and back by
    each that can. Fails if none works.
    """
    console = Console()
    try:
        found = workload.devices(backend, ranks)
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error
    console.print(versions(found))
    console.print(device_table(found))
    gpus = [device for device in found if device.platform == "gpu"]
    if with_links and len(gpus) > 1:
        console.print(link_table(gpus))
    if len(found) == 1 and found[0].platform == "cpu":
        console.print("One CPU device; --ranks 8 makes virtual ones.")
    verdicts = probe.try_transports(found)
    console.print(transport_table(verdicts, len(found)))
    if all(verdict.reason is not None for verdict in verdicts):
        raise click.ClickException("no transport works on these devices.")


def versions(found: Sequence[jax.Device]) -> Table:
    """Versions of Python, jax_ep, JAX and CUDA."""
    table = Table("", "version", title="Versions")
    table.add_row("python", platform.python_version())
    table.add_row("jax_ep", jax_ep.__version__)
    for name in ("jax", "jaxlib", "numpy"):
        table.add_row(name, metadata.version(name))
    table.add_row("backend", found[0].client.platform_version.replace("\n", ", "))
    for name, version in cuda_versions().items():
        table.add_row(name, version)
    return table


def cuda_versions() -> dict[str, str]:
    """CUDA's versions, as the extension sees them."""
    try:
        numbers = extension.load_cuda().cuda_versions()
    except ImportError:
        return {"jax_ep._ffi_cuda": "not built: no CUDA kernels"}
    return {
        name: f"{number // 1000}.{number % 1000 // 10}" if number else "none"
        for name, number in numbers.items()
    }


def device_table(found: Sequence[jax.Device]) -> Table:
    """One line per device, in rank order."""
    table = Table("rank", "device", "platform", "kind", "memory", title="Devices of this process")
    for rank, device in enumerate(found):
        limit = (device.memory_stats() or {}).get("bytes_limit")
        memory = "" if limit is None else f"{limit / _GIB:.1f} GiB for JAX"
        table.add_row(str(rank), str(device.id), device.platform, device.device_kind, memory)
    return table


def link_table(gpus: Sequence[jax.Device]) -> Table:
    """GB/s from each GPU to each other one."""
    table = Table("from \\ to", title="Copies, GB/s (*: loads and stores, too)")
    for gpu in gpus:
        table.add_column(str(gpu.id), justify="right")
    for source in gpus:
        table.add_row(str(source.id), *(_link(source, target) for target in gpus))
    return table


def _link(source: jax.Device, target: jax.Device) -> str:
    if source == target:
        return "-"
    star = {True: "*", False: "", None: "?"}[links.reaches(source, target)]
    return f"{links.gb_per_s(source, target):.0f}{star}"


def transport_table(verdicts: Sequence[probe.Verdict], n_ranks: int) -> Table:
    """Which transports work, and why the others do not."""
    ranks = "1 rank" if n_ranks == 1 else f"{n_ranks} ranks"
    table = Table("transport", f"serves {ranks}", title="Transports")
    for name, reason in verdicts:
        table.add_row(name, "[green]yes[/]" if reason is None else f"[red]no[/]: {escape(reason)}")
    return table
