# SPDX-License-Identifier: Apache-2.0
"""Writes the signatures into docs/api, below the `:::` lines: GitHub shows nothing in their place.

The site has no use for them, as mkdocstrings makes its own (docs_hook.py). Needs the package with
Flax. tests/tools/test_docs.py checks that the pages are as this writes them.

Usage: python tools/api_signatures.py
"""

import importlib
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

PAGES = Path(__file__).resolve().parents[1] / "docs" / "api"
# A `:::` line with its options, and the block that follows.
ENTRY = re.compile(r"^(::: (\S+)\n(?: +\S.*\n)*)(?:\n```python\n[^`]*```\n)?", re.MULTILINE)
WIDTH = 96


def with_signatures(markdown: str) -> str:
    """The page, with the signature of each entry that has one."""

    def entry(found: re.Match[str]) -> str:
        text = signature_of(found[2])
        return found[1] + (f"\n```python\n{text}\n```\n" if text else "")

    return ENTRY.sub(entry, markdown)


def signature_of(path: str) -> str:
    """A call, without annotations; the methods and properties of a class that others make."""
    module, _, name = path.rpartition(".")
    value = getattr(importlib.import_module(module), name)
    if not callable(value) or _is_variable(value):
        return ""
    if inspect.isclass(value) and re.match("Use `|Made by", inspect.getdoc(value.__init__) or ""):
        members = {key: x for key, x in vars(value).items() if not key.startswith("_")}
        calls = [_call(f"{name}.{key}", x) for key, x in members.items() if inspect.isfunction(x)]
        return "\n".join(
            [*calls, *(f"{name}.{key}" for key, x in members.items() if isinstance(x, property))]
        )
    return _call(name, value)


def _call(name: str, value: Any) -> str:
    # The metaclass of `nnx.Module` has a signature of its own.
    is_module = inspect.isclass(value) and type(value) is not type
    given = inspect.signature(value.__init__ if is_module else value).parameters.values()
    parameters: list[str] = []
    for each in given:
        if each.kind is each.KEYWORD_ONLY and not any(x.startswith("*") for x in parameters):
            parameters.append("*")
        if each.name != "self":
            parameters.append(_parameter(each))
    text = f"{name}({', '.join(parameters)})"
    return "\n".join(textwrap.wrap(text, WIDTH, subsequent_indent="    ", break_on_hyphens=False))


def _is_variable(value: Any) -> bool:
    """Whether it is a kind of `nnx.Variable`."""
    return inspect.isclass(value) and any(base.__name__ == "Variable" for base in value.__mro__)


def _parameter(each: inspect.Parameter) -> str:
    stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
    if each.default is each.empty:
        return stars + each.name
    default = each.default
    text = getattr(default, "__name__", None) or repr(default)
    return f"{each.name}={'...' if text.startswith('<') else text}".replace(" ", "")


if __name__ == "__main__":
    for page in sorted(PAGES.glob("*.md")):
        page.write_text(with_signatures(page.read_text()))
