"""docs/dev/seed_map.md: everything that it refers to exists."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
REFERENCE = re.compile(r"`((?:jax_ep|ffi|tests|examples|benchmarks)/[\w./]+?)(?::(\w+))?`")
NONE = "none needed"


def read_rows() -> list[list[str]]:
    lines = (ROOT / "docs" / "dev" / "seed_map.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("|")]
    cells = [[c.strip() for c in row.removesuffix("|")[1:].split("|")] for row in rows]
    return [c for c in cells if c[0] != "name" and set(c[0]) != {"-"}]


ROWS = read_rows()


def test_rows_are_complete_and_names_are_unique():
    assert len(ROWS) > 150
    for row in ROWS:
        assert len(row) == 4, row
        assert all(row), row
    names = [row[0] for row in ROWS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_reference_exists(row):
    name, _, here, how = row
    references = REFERENCE.findall(here)
    assert len(references) == 1 or here == NONE, name
    for path, symbol in references + REFERENCE.findall(how):
        text = (ROOT / path).read_text()
        assert re.search(rf"\b{symbol}\b", text), f"{name}: no {symbol} in {path}"
    assert "`" not in REFERENCE.sub("", here), f"{name}: unknown reference in {here}"
