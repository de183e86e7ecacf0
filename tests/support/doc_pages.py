"""The pages of the documentation, and their blocks of code."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def python_blocks(page: pathlib.Path) -> list[str]:
    return [text for language, _, text in BLOCK.findall(page.read_text()) if language == "python"]
