"""From a record to rows of a table, comparisons and failures. Needs NumPy at most."""

from __future__ import annotations

from typing import Any

from gpu.contestants import OURS, RIVALS

OPERATIONS = ("dispatch", "combine")


def failures(record: dict[str, Any]) -> list[str]:
    """What was wrong, crashed, or could not be measured."""
    parts = [
        *record["results"],
        *record.get("overlaps", []),
        *record.get("formats", []),
    ]
    if record["machine"].get("n_devices", 0) > 1 and "link" in record:
        parts.append({"name": "link", **record["link"]})
    return [
        f"{part['name']}: {why}" for part in parts for why in part.get("failed", [])
    ]


def brief(result: dict[str, Any]) -> str:
    """One result in a line."""
    if "gb_s" in result:
        return f"{result['gb_s']} GB/s"
    words = [
        f"{operation} {result[operation]['median_us']:.1f} µs"
        for operation in OPERATIONS
        if "median_us" in result.get(operation, {})
    ]
    words += [
        f"{operation} {100 * result[operation]['hidden']:.0f} % hidden"
        for operation in OPERATIONS
        if "hidden" in result.get(operation, {})
    ]
    if "pair_period" in result:
        words.append(f"pair {result['pair_period']['median_us']:.1f} µs")
    if "overhead_us" in result:
        words.append(f"overhead {result['overhead_us']:.1f} µs per call")
    words += [f"FAILED {why}" for why in result.get("failed", [])]
    return ", ".join(words)


def cases(record: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each case and its results by contestant, with command buffers; sorted."""
    found: dict[tuple, tuple[dict, dict]] = {}
    for result in record["results"]:
        if result["command_buffers"]:
            key = _order(result["case"])
            found.setdefault(key, (result["case"], {}))[1][result["who"]] = result
    return [found[key] for key in sorted(found)]


def best_rival(
    results: dict[str, dict[str, Any]], operation: str
) -> tuple[str, float] | None:
    """The fastest rival of a case, and its median in microseconds."""
    times = {
        who: results[who][operation]["median_us"]
        for who in RIVALS
        if operation in results.get(who, {})
    }
    return min(times.items(), key=lambda item: item[1]) if times else None


def command_buffers(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Periods with and without command buffers, for cases that have both."""
    rows = []
    for result in record["results"]:
        if result["command_buffers"] or "pair_period" not in result:
            continue
        for other in record["results"]:
            same = (other["case"], other["who"]) == (result["case"], result["who"])
            if same and other["command_buffers"] and "pair_period" in other:
                rows.append({"case": result["case"], "with": other, "without": result})
    return sorted(rows, key=lambda row: _order(row["case"]))


def table(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a row per case and contestant."""
    header = ["T", "H", "routing", "contestant", "capacity"]
    for operation in OPERATIONS:
        header += [f"{operation}, µs", "min to max", "GB/s of rows", "GB/s off GPU"]
    header += ["% of link", "pair, µs", "overhead, µs"]
    link = record.get("link", {}).get("gb_s")
    rows = []
    for case, results in cases(record):
        for who in (*OURS, *RIVALS):
            if who in results:
                rows.append(_row(case, who, results[who], link))
    return header, rows


def overlap_table(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a row per number of multiprocessors and operation."""
    header = ["call", "n_sms", "all SMs, µs", "n_sms, µs", "dense, µs", "both, µs"]
    header += ["hidden, %", "of n_sms, %", "longer, %", "kernels, %", "speed-up"]
    rows = []
    measured = [r for r in record.get("overlaps", []) if "n_sms" in r]
    for result in sorted(measured, key=_by_sms):
        for operation in OPERATIONS:
            if operation not in result:
                continue
            sustained = result[operation]
            what = f"{operation}, T {result['case']['n_tokens']}"
            what += f", width {result['dense_width']}"
            n_sms = str(result["n_sms"] or "default")
            slower = sustained["dense_slowdown"]
            slower = _number(None if slower is None else 100 * slower, 0)
            rows.append([what, n_sms, *_overlap_cells(sustained, slower)])
            if "burst" in sustained:
                what = f"{operation}, burst"
                rows.append([what, n_sms, *_overlap_cells(sustained["burst"], "")])
    return header, rows


def _overlap_cells(got: dict[str, Any], slower: str) -> list[str]:
    names = ("call_us", "call_some_sms_us", "dense_us", "both_us")
    return [
        *(f"{got[name]:.0f}" for name in names),
        f"{100 * got['hidden']:.0f}",
        f"{100 * got['hidden_same_sms']:.0f}",
        f"{100 * (got['both_us'] / got['dense_us'] - 1):.0f}",
        slower,
        f"{got['speedup']:.2f}",
    ]


def format_table(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a row per size and token format."""
    header = ["T", "H", "format", "bytes per token", "per message", "MB off the GPU"]
    header += ["dispatch, µs", "min to max", "GB/s off the GPU", "of bf16"]
    rows = []
    results = [r for r in record.get("formats", []) if "dispatch" in r]
    plain = {
        r["case"]["n_tokens"]: r["dispatch"]["median_us"]
        for r in results
        if r["token_format"] == "bf16"
    }
    for result in sorted(results, key=lambda r: r["case"]["n_tokens"]):
        case, times = result["case"], result["dispatch"]
        whole = plain.get(case["n_tokens"])
        rows.append(
            [
                str(case["n_tokens"]),
                str(case["hidden_size"]),
                result["token_format"],
                str(result["token_bytes"]),
                str(result["message_bytes"]),
                f"{result['bytes_off_the_gpu'] / 1e6:.1f}",
                f"{times['median_us']:.1f}",
                f"{times['min_us']:.1f} to {times['max_us']:.1f}",
                f"{times['physical_gb_s']:.0f}",
                f"{times['median_us'] / whole:.2f}" if whole else "-",
            ]
        )
    return header, rows


def more_tables(record: dict[str, Any]) -> dict[str, tuple[list, list[list[str]]]]:
    """Those that have rows, by title."""
    tables = {
        "Dispatch by token format": format_table(record),
        "A call beside a dense layer": overlap_table(record),
    }
    return {title: table for title, table in tables.items() if table[1]}


def _by_sms(result: dict[str, Any]) -> tuple[int, int]:
    return result["case"]["n_tokens"], result["n_sms"] or 1 << 30


def link_words(record: dict[str, Any]) -> str:
    """What the link carries and how that was found; empty if it was not."""
    link = record.get("link", {})
    if "gb_s" not in link:
        return ""
    words = f"{link['gb_s']:.0f} GB/s off each GPU by {link['method']}"
    engines = link.get("gb_s_by_copy_engines")
    return words + (f"; {engines:.0f} by copy engines" if engines else "")


def as_text(record: dict[str, Any]) -> str:
    """Tables in plain text."""
    lines = [_plain(*table(record))] if record["results"] else []
    for title, more in more_tables(record).items():
        lines += ["", title, _plain(*more)]
    header, rows = command_buffer_table(record)
    if rows:
        lines += ["", "command buffers: µs of a dispatch and a combine, chained"]
        lines.append(_plain(header, rows))
    if link := link_words(record):
        lines += ["", f"link: {link}"]
    lines += [f"failed: {why}" for why in failures(record)]
    lines += [f"not measured: {why}" for why in record.get("not_measured", [])]
    return "\n".join(lines)


def command_buffer_table(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows."""
    header = ["T", "with", "without", "overhead with", "overhead without"]
    rows = []
    for row in command_buffers(record):
        pair = [row[which] for which in ("with", "without")]
        cells = [f"{r['pair_period']['median_us']:.1f}" for r in pair]
        cells += [_number(r.get("overhead_us")) for r in pair]
        rows.append([str(row["case"]["n_tokens"]), *cells])
    return header, rows


def _order(case: dict[str, Any]) -> tuple:
    return (-case["hidden_size"], case["routing"] != "uniform", case["n_tokens"])


def _row(case: dict, who: str, result: dict, link: float | None) -> list[str]:
    cells = [str(case["n_tokens"]), str(case["hidden_size"]), case["routing"], who]
    cells.append(str(result.get("capacity", "-")))
    shares = []
    for operation in OPERATIONS:
        figures = result.get(operation)
        if figures is None:
            cells += ["-"] * 4
            continue
        cells.append(f"{figures['median_us']:.1f}")
        cells.append(f"{figures['min_us']:.1f} to {figures['max_us']:.1f}")
        cells.append(f"{figures['logical_gb_s']:.0f}")
        cells.append(_number(figures.get("physical_gb_s"), 0))
        if link and "physical_gb_s" in figures:
            shares.append(f"{100 * figures['physical_gb_s'] / link:.0f}")
    cells.append(", ".join(shares) or "-")
    cells.append(_number(result.get("pair_period", {}).get("median_us")))
    cells.append(_number(result.get("overhead_us")))
    return cells


def _number(value: float | None, decimals: int = 1) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"


def _plain(header: list[str], rows: list[list[str]]) -> str:
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in [header, *rows]
    ]
    return "\n".join(lines)
