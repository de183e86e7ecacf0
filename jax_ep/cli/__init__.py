"""The command line, `python -m jax_ep doctor`: what this machine has, and which transports work.

Needs the extra `cli`.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import click
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
    console, report = Console(), {}
    for key, value in facts.findings(found, with_links):
        report[key] = value
        if not as_json and key in _TABLES:
            for each in _TABLES[key](report):
                console.print(each)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    if not any(each["works"] for each in report["transports"]):
        raise click.ClickException("no transport works on these devices.")


def _versions(report: dict[str, Any]) -> Iterator[Table]:
    """Versions of Python, jax_ep, JAX and CUDA."""
    table = Table("", "version", title="Versions")
    for name, version in report["versions"].items():
        table.add_row(name, version)
    cuda, found_nvshmem = report["cuda"], report["nvshmem"]
    if cuda is None:
        table.add_row("jax_ep._ffi_cuda", "not built: no CUDA kernels")
    else:
        for name, number in cuda.items():
            table.add_row(f"CUDA {name}", number or "none")
        table.add_row("NVSHMEM", found_nvshmem["version"] or f"none: {found_nvshmem['reason']}")
    yield table


def _devices(report: dict[str, Any]) -> Iterator[Table]:
    """One line per device, in rank order."""
    table = Table("rank", "device", "platform", "kind", "memory", title="Devices of this process")
    for each in report["devices"]:
        n_bytes = each["memory_bytes"]
        memory = "" if n_bytes is None else f"{n_bytes / _GIB:.1f} GiB for JAX"
        table.add_row(str(each["rank"]), str(each["id"]), each["platform"], each["kind"], memory)
    yield table


def _links(report: dict[str, Any]) -> Iterator[Table | str]:
    """GB/s from each GPU to each other one; advice if nothing is exchanged."""
    stars = {True: "*", False: "", None: "?"}
    cells = {
        (each["source"], each["target"]): f"{each['gb_per_s']:.0f}{stars[each['direct']]}"
        for each in report["links"]
    }
    if cells:
        gpus = list(dict.fromkeys(source for source, _ in cells))
        table = Table("from \\ to", title="Copies, GB/s (*: loads and stores, too)")
        for gpu in gpus:
            table.add_column(str(gpu), justify="right")
        for source in gpus:
            table.add_row(str(source), *(cells.get((source, gpu), "-") for gpu in gpus))
        yield table
    if [each["platform"] for each in report["devices"]] == ["cpu"]:
        yield "One CPU device; --ranks 8 makes virtual ones."


def _transports(report: dict[str, Any]) -> Iterator[Table]:
    """Which transports work, and why the others do not."""
    n_ranks = len(report["devices"])
    ranks = "1 rank" if n_ranks == 1 else f"{n_ranks} ranks"
    table = Table("transport", f"serves {ranks}", title="Transports")
    for each in report["transports"]:
        answer = "[green]yes[/]" if each["works"] else f"[red]no[/]: {escape(each['reason'])}"
        table.add_row(each["name"], answer)
    yield table


# What is printed once a fact is known.
_TABLES: dict[str, Callable[[dict[str, Any]], Iterator[Table | str]]] = {
    "nvshmem": _versions,
    "devices": _devices,
    "links": _links,
    "transports": _transports,
}
