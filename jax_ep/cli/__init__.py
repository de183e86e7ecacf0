"""The command line, `python -m jax_ep doctor`: what this machine has, and which transports work.

Needs the extra `cli`.
"""

import json
from collections.abc import Sequence

import click
import jax
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jax_ep.cli import facts

_GIB = 1 << 30


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Expert parallelism for JAX: what works on this machine."""


@main.command()
@click.option("--ranks", type=click.IntRange(1), help="Devices to use; default: all.")
@click.option("--platform", "backend", help="cpu or gpu; default: the one JAX prefers.")
@click.option("--links/--no-links", "with_links", default=True, help="Measure copies.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; see docs/gpus.md.")
def doctor(ranks: int | None, backend: str | None, with_links: bool, as_json: bool) -> None:
    """Shows versions, devices, links and transports.

    Asks every transport whether it can serve the devices, and sends a few tokens there and back by
    each that can. Fails if none works.
    """
    try:
        found = facts.find_devices(backend, ranks)
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error
    if not (_print_json if as_json else _print_tables)(found, with_links):
        raise click.ClickException("no transport works on these devices.")


def _print_json(found: Sequence[jax.Device], with_links: bool) -> bool:
    """Returns whether a transport works."""
    report = facts.report(found, with_links)
    click.echo(json.dumps(report, indent=2))
    return any(each["works"] for each in report["transports"])


def _print_tables(found: Sequence[jax.Device], with_links: bool) -> bool:
    """Prints each table as soon as its facts are known; returns whether a transport works."""
    console = Console()
    console.print(version_table(found))
    console.print(device_table(found))
    gpus = [device for device in found if device.platform == "gpu"]
    if with_links and len(gpus) > 1:
        console.print(link_table(gpus))
    if len(found) == 1 and found[0].platform == "cpu":  # nothing is exchanged
        console.print("One CPU device; --ranks 8 makes virtual ones.")
    verdicts = facts.try_transports(found)
    console.print(transport_table(verdicts, len(found)))
    return any(verdict.reason is None for verdict in verdicts)


def version_table(found: Sequence[jax.Device]) -> Table:
    """Versions of Python, jax_ep, JAX and CUDA."""
    table = Table("", "version", title="Versions")
    for name, version in facts.versions(found).items():
        table.add_row(name, version)
    cuda = facts.cuda_versions()
    if cuda is None:
        table.add_row("jax_ep._ffi_cuda", "not built: no CUDA kernels")
    for name, number in (cuda or {}).items():
        table.add_row(f"CUDA {name}", number or "none")
    if cuda is not None:
        found_nvshmem = facts.nvshmem()
        table.add_row("NVSHMEM", found_nvshmem["version"] or f"none: {found_nvshmem['reason']}")
    return table


def device_table(found: Sequence[jax.Device]) -> Table:
    """One line per device, in rank order."""
    table = Table("rank", "device", "platform", "kind", "memory", title="Devices of this process")
    for rank, number, platform, kind, n_bytes in facts.devices(found):
        memory = "" if n_bytes is None else f"{n_bytes / _GIB:.1f} GiB for JAX"
        table.add_row(str(rank), str(number), platform, kind, memory)
    return table


def link_table(gpus: Sequence[jax.Device]) -> Table:
    """GB/s from each GPU to each other one."""
    stars = {True: "*", False: "", None: "?"}
    links = facts.measured_links(gpus)
    cells = {(x.source, x.target): f"{x.gb_per_s:.0f}{stars[x.direct]}" for x in links}
    table = Table("from \\ to", title="Copies, GB/s (*: loads and stores, too)")
    for gpu in gpus:
        table.add_column(str(gpu.id), justify="right")
    for source in gpus:
        row = [cells.get((source.id, target.id), "-") for target in gpus]
        table.add_row(str(source.id), *row)
    return table


def transport_table(verdicts: Sequence[facts.Verdict], n_ranks: int) -> Table:
    """Which transports work, and why the others do not."""
    ranks = "1 rank" if n_ranks == 1 else f"{n_ranks} ranks"
    table = Table("transport", f"serves {ranks}", title="Transports")
    for name, reason in verdicts:
        table.add_row(name, "[green]yes[/]" if reason is None else f"[red]no[/]: {escape(reason)}")
    return table
