"""What a file of figures says: as Markdown, as a table, as a figure."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

from gpu import figures
from gpu.contestants import OURS

_PAIR = "µs of a dispatch and a combine in a chain"


def show(path: pathlib.Path, form: str) -> None:
    """Prints it, or writes a PNG beside the file."""
    record = json.loads(path.read_text())
    if form == "markdown":
        print(markdown(record))
    elif form == "table":
        _print_table(record)
    else:
        from gpu import figure

        figure.draw(record, path.with_suffix(".png"))
        print(f"wrote {path.with_suffix('.png')}")


def markdown(record: dict[str, Any]) -> str:
    """For README.md: our kernels beside the link and the fastest rival, by case.

    Then what command buffers change, and what the link carries.
    """
    header = ["T", "H, routing"]
    for operation in figures.OPERATIONS:
        header += [f"{operation}, µs", "GB/s off the GPU", "best `jax.lax`, µs"]
    header.append("overhead, µs per call")
    rows = []
    for case, results in figures.cases(record):
        for who in OURS:
            if who in results:
                rows.append(_row(record, case, who, results))
    parts = [_table(header, rows)] if rows else []
    header, rows = figures.command_buffer_table(record)
    if rows:
        parts += [f"Command buffers, {_PAIR}:", _table(header, rows)]
    for title, table in figures.more_tables(record).items():
        parts += [f"{title}:", _table(*table)]
    if link := figures.link_words(record):
        parts.append(f"Link: {link}.")
    return "\n\n".join(parts)


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _row(
    record: dict[str, Any], case: dict[str, Any], who: str, results: dict[str, Any]
) -> list[str]:
    link = record.get("link", {}).get("gb_s")
    kind = f"{case['hidden_size']}, {case['routing']}"
    cells = [str(case["n_tokens"]), kind + who.removeprefix(OURS[0])]
    for operation in figures.OPERATIONS:
        ours = results[who].get(operation)
        if ours is None:
            cells += ["–"] * 3
            continue
        rate = ours["physical_gb_s"]
        share = f" ({100 * rate / link:.0f} %)" if link else ""
        rival = figures.best_rival(results, operation)
        times = rival[1] / ours["median_us"] if rival else 0
        cells += [
            _us(ours["median_us"]),
            f"{rate:.0f}{share}",
            f"{_us(rival[1])} ({times:.1f}×)" if rival else "–",
        ]
    overhead = results[who].get("overhead_us")
    return [*cells, "–" if overhead is None else f"{overhead:.1f}"]


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _print_table(record: dict[str, Any]) -> None:
    import rich.console
    import rich.table

    console = rich.console.Console(width=None if sys.stdout.isatty() else 200)
    for title, (header, rows) in {
        _title(record): figures.table(record),
        f"command buffers: {_PAIR}": figures.command_buffer_table(record),
        **figures.more_tables(record),
    }.items():
        if rows:
            table = rich.table.Table(title=title, title_justify="left")
            for name in header:
                justify = "left" if name in ("routing", "contestant") else "right"
                table.add_column(name, justify=justify)
            for row in rows:
                table.add_row(*row)
            console.print(table)
    for failure in figures.failures(record):
        console.print(f"[red]failed[/]: {failure}")


def _title(record: dict[str, Any]) -> str:
    machine = record["machine"]
    link = figures.link_words(record)
    words = [f"{machine['n_devices']} × {machine['device']}", f"jax {machine['jax']}"]
    words += [link] if link else []
    return ", ".join(words)
