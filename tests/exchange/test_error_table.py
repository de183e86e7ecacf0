"""Every row of docs/errors.md: the misuse raises an error of that type with that text."""

import dataclasses
import pathlib
import re

import jax
import numpy as np
import pytest

from error_triggers import TRIGGERS
from error_triggers.base import T, init
from error_triggers.calls import call

pytestmark = pytest.mark.usefixtures("one_process")
TABLE = pathlib.Path(__file__).parents[2] / "docs" / "errors.md"


@dataclasses.dataclass
class Row:
    """A row of docs/errors.md."""

    id: str
    when: str
    error_type: str
    text: str


def read_table() -> list[Row]:
    row = r'^\| <a id="([a-z-]+)"></a>`(.+?)` \| .+ \| (\w+) \| (\w+) \|$'
    found = re.findall(row, TABLE.read_text(), re.MULTILINE)
    return [Row(id, when, error_type, text) for id, text, when, error_type in found]


def test_each_row_of_the_table_has_a_trigger():
    ids = [row.id for row in read_table()]
    assert len(ids) > 30
    assert sorted(ids) == sorted(TRIGGERS)


@pytest.mark.parametrize("row", read_table(), ids=lambda row: row.id)
def test_misuse_raises_what_the_table_says(row):
    with pytest.raises(Exception) as caught:  # noqa: PT011 (type and text follow)
        TRIGGERS[row.id]()
    assert type(caught.value).__name__ == row.error_type, caught.value
    pattern = ".*".join(re.escape(part) for part in row.text.split("…"))
    assert re.search(pattern, str(caught.value), re.DOTALL), caught.value


def test_the_process_survives_a_failed_run():
    """All ranks serve the next call: the one that failed, and those that it took down."""
    for trigger in ("failed-rank", "missing-rank", "changed-handle"):
        with pytest.raises(jax.errors.JaxRuntimeError):
            TRIGGERS[trigger]()
        out = call(init(timeout_s=30))
        assert np.all(np.asarray(out[:T], np.float32) == 1)
