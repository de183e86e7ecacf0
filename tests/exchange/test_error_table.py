"""Every item of docs/errors.md: the misuse raises an error of that type with that text."""

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
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "errors.md"


@dataclasses.dataclass
class Row:
    """An item of docs/errors.md."""

    id: str
    text: str
    error_type: str
    when: str


def read_page() -> list[Row]:
    """The items of each section, whose first line says what they raise and when."""
    item = r'^\* <a id="([a-z-]+)"></a>`(.+?)`(?: \(.+\))?(?:: (\w+), (\w+))?$'
    rows = []
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE):
        usual = re.search(r"^\*\*(\w+), (\w+)\*\*", section, re.MULTILINE)
        for id, text, error_type, when in re.findall(item, section, re.MULTILINE):
            rows.append(Row(id, text, error_type or usual[1], when or usual[2]))
    return rows


def test_each_item_of_the_page_has_a_trigger():
    ids = [row.id for row in read_page()]
    assert len(ids) > 200
    assert sorted(ids) == sorted(TRIGGERS)


@pytest.mark.parametrize("row", read_page(), ids=lambda row: row.id)
def test_misuse_raises_what_the_page_says(row):
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
