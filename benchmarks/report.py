"""From measured figures to speed-ups, bars and a table."""

from __future__ import annotations

from typing import Any

import rich.console
import rich.table

from bench_cases import OURS

#: Speed-up over the best other contestant that we want at `_LARGE` tokens per rank.
GOAL = 3.0
_LARGE = 2048
_ALLOCATORS = {"default": "allocator as users have it", "keep": "freed memory kept"}


def speedups(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Host against the best other, for each case and operation."""
    result = []
    for case in record["cases"]:
        for operation, figures in case.get("results", {}).items():
            others = {name: f for name, f in figures.items() if name != OURS}
            if OURS not in figures or not others:
                continue
            best = min(others, key=lambda name: others[name]["median_ms"])
            ratio = {
                name: round(others[best][name] / figures[OURS][name], 3)
                for name in ("median_ms", "median_cpu_ms")
            }
            result.append(
                {
                    "case": case["name"],
                    "n_tokens": case["case"]["n_tokens"],
                    "allocator": case["case"]["allocator"],
                    "operation": operation,
                    "best": best,
                    "speedup": ratio["median_ms"],
                    "cpu_speedup": ratio["median_cpu_ms"],
                }
            )
    return result


def failures(record: dict[str, Any]) -> list[str]:
    """What broke: a wrong result, a crash, a time limit."""
    parts = [*record["cases"], {"name": "call overhead", **record["call_overhead"]}]
    return [
        f"{part['name']}: {why}" for part in parts for why in part.get("failed", [])
    ]


def bars(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The goals, each with whether it is met and what misses it."""
    goals = []
    for allocator, words in _ALLOCATORS.items():
        some = [row for row in speedups(record) if row["allocator"] == allocator]
        large = [row for row in some if row["n_tokens"] == _LARGE]
        goals += [
            (f"at least {GOAL:g}x faster at T = {_LARGE}, {words}", large, GOAL),
            (f"nowhere slower, {words}", some, 1.0),
        ]
    return [_bar(*goal, failures(record)) for goal in goals if goal[1]]


def _bar(
    goal: str, concerned: list[dict[str, Any]], limit: float, failed: list[str]
) -> dict[str, Any]:
    missed_by = [
        f"{row['case']}, {row['operation']}: {row['speedup']:.2f}x"
        for row in concerned
        if row["speedup"] < limit
    ]
    return {
        "goal": goal,
        "n": len(concerned),
        "met": not missed_by and not failed,
        "missed_by": missed_by,
    }


def print_tables(record: dict[str, Any], console: rich.console.Console) -> None:
    """Milliseconds, the overhead of a call, and the bars."""
    console.print(_times_table(record))
    for case in record["cases"]:
        for reason in case.get("skipped", []):
            console.print(f"not measured: {case['name']}: {reason}")
    if "failed" not in record["call_overhead"]:
        console.print(_overhead_table(record["call_overhead"]))
    for failure in failures(record):
        console.print(f"[red]failed[/]: {failure}")
    for bar in bars(record):
        verdict = "[green]met[/]" if bar["met"] else "[red]not met[/]"
        console.print(f"host {bar['goal']}: {verdict} ({bar['n']} rows)")
        for miss in bar["missed_by"]:
            console.print(f"    {miss}")


def _times_table(record: dict[str, Any]) -> rich.table.Table:
    table = rich.table.Table(
        title="ms per call, all 8 ranks: median (min to max)", title_justify="left"
    )
    names = _contestants(record)
    table.add_column("case", no_wrap=True)
    table.add_column("operation", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("host against best other", justify="right")
    ratios = {(row["case"], row["operation"]): row for row in speedups(record)}
    for case in record["cases"]:
        for operation, figures in case.get("results", {}).items():
            row = ratios.get((case["name"], operation))
            table.add_row(
                case["name"] if operation == next(iter(case["results"])) else "",
                operation,
                *(_cell(figures.get(name)) for name in names),
                f"{row['speedup']:.2f}x" if row else "-",
            )
        table.add_section()
    return table


def _contestants(record: dict[str, Any]) -> list[str]:
    names: dict[str, None] = {}
    for case in record["cases"]:
        for figures in case.get("results", {}).values():
            names.update(dict.fromkeys(figures))
    return list(names)


def _cell(figures: dict[str, Any] | None) -> str:
    if figures is None:
        return "-"
    middle, low, high = (
        _ms(figures[f"{name}_ms"]) for name in ("median", "min", "max")
    )
    return f"{middle} ({low} to {high})"


def _ms(value: float) -> str:
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{decimals}f}"


def _overhead_table(overhead: dict[str, Any]) -> rich.table.Table:
    table = rich.table.Table(
        title="µs per call, 1 device, minimal size", title_justify="left"
    )
    table.add_column("jitted call")
    for name in ("median", "min", "max"):
        table.add_column(name, justify="right")
    for name, figures in overhead.items():
        cells = (f"{figures[f'{which}_us']:.1f}" for which in ("median", "min", "max"))
        table.add_row(name, *cells)
    return table
