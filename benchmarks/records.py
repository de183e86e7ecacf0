"""Results files: runs, each with its facts and tables. README.md describes the format."""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

Row = dict[str, Any]

_MIN_PART = 3  # rows of a part of a table, on average
# Kinds of values; a name with a "?" may be missing.
_KINDS: dict[str, Any] = {"str": str, "bool": bool, "int": int, "dict": dict}
_KINDS |= {"number": int | float, "numbers": list | tuple}

_SCHEMA = json.loads(pathlib.Path(__file__).with_name("schema.json").read_text())
# Kinds of values by name: the facts of a run, and the columns of each table in written order.
FACTS: dict[str, str] = _SCHEMA.pop("run")
TABLES: dict[str, dict[str, str]] = _SCHEMA


@dataclasses.dataclass
class Run:
    """The measurements of one command on one machine.

    Attributes:
        facts: what `FACTS` names.
        tables: rows by the name of their table, in `TABLES`. What is None is left out.
    """

    facts: dict[str, Any]
    tables: dict[str, list[Row]] = dataclasses.field(default_factory=dict)

    def add(self, table: str, row: Row) -> None:
        """Adds a row."""
        self.tables.setdefault(table, []).append({k: v for k, v in row.items() if v is not None})

    def rows(self, table: str) -> list[Row]:
        """Returns the rows of a table, none if it is not there."""
        return self.tables.get(table, [])


def write(path: pathlib.Path, runs: Iterable[Run]) -> None:
    """Writes a results file. Raises ValueError if it would not follow the format."""
    lines: list[Any] = []
    for run in runs:
        check(run)
        lines.append({"run": {k: v for k, v in run.facts.items() if v is not None}})
        for name in TABLES:
            for rows in _parts(name, run.rows(name)):
                lines += _lines(name, rows)
    texts = (json.dumps(x, ensure_ascii=False, separators=(",", ":")) for x in lines)
    path.write_text("".join(f"{text}\n" for text in texts))


def _parts(name: str, rows: list[Row]) -> list[list[Row]]:
    """Splits a table where its first column changes, if that does not happen often."""
    first = next(iter(TABLES[name]))
    parts = [list(part) for _, part in itertools.groupby(rows, lambda row: row.get(first))]
    return parts if len(parts) * _MIN_PART <= len(rows) else [rows]


def _lines(name: str, rows: list[Row]) -> Iterator[Any]:
    """The lines of a table: its columns, what all rows share, and the other values by row."""
    if not rows:
        return
    columns = [column for column in TABLES[name] if any(column in row for row in rows)]
    shared = {c: rows[0][c] for c in columns if all(row.get(c) == rows[0].get(c) for row in rows)}
    shared = shared if len(rows) > 1 else {}
    columns = [column for column in columns if column not in shared]
    yield {"table": name, "columns": columns} | ({"all": shared} if shared else {})
    for row in rows:
        yield [row.get(column) for column in columns]


def read(path: pathlib.Path) -> list[Run]:
    """Reads a results file. Raises ValueError if it does not follow the format."""
    runs: list[Run] = []
    table: dict[str, Any] = {}
    for number, text in enumerate(path.read_text().splitlines(), 1):
        line = json.loads(text)
        if isinstance(line, dict) and "run" in line:
            runs.append(Run(line["run"]))
            table = {}
        elif isinstance(line, dict) and {"table", "columns"} <= line.keys() and runs:
            table = line
        elif isinstance(line, list) and len(line) == len(table.get("columns", ())) and table:
            row = dict(zip(table["columns"], line, strict=True)) | table.get("all", {})
            runs[-1].add(table["table"], row)
        else:
            raise ValueError(
                f"{path.name}:{number}: a line must be a run, a table of it, or a row with a value "
                f"for each column of the table; got {text[:80]}"
            )
    for run in runs:
        check(run)
    return runs


def check(run: Run) -> None:
    """Raises ValueError unless facts, tables and columns are those that schema.json lists."""
    _check_row("run", FACTS, run.facts)
    unknown = run.tables.keys() - TABLES.keys()
    if unknown:
        raise ValueError(f"tables must be of {', '.join(TABLES)}; got {', '.join(unknown)}.")
    for name, rows in run.tables.items():
        for row in rows:
            _check_row(name, TABLES[name], row)


def _check_row(name: str, columns: dict[str, str], row: Row) -> None:
    missing = [c for c, kind in columns.items() if kind[-1] != "?" and row.get(c) is None]
    unknown = row.keys() - columns.keys()
    if missing or unknown:
        wrong = ", ".join(sorted([*missing, *unknown]))
        raise ValueError(f"{name}: {wrong} must be there if required, and known; got {row}.")
    for column, value in row.items():
        if value is not None and not _is_of(value, columns[column].rstrip("?")):
            kind = columns[column]
            raise ValueError(f"{name}: {column} must be of kind {kind}; got {value!r}.")


def _is_of(value: Any, kind: str) -> bool:
    """Whether a value is of that kind; a bool is no number."""
    if isinstance(value, bool) or not isinstance(value, _KINDS[kind]):
        return isinstance(value, bool) and kind == "bool"
    return kind != "numbers" or all(_is_of(x, "number") for x in value)
