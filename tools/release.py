# SPDX-License-Identifier: Apache-2.0
"""Says whether a tag is that of the release in this folder, and where its documentation belongs.

Usage: python3 tools/release.py check TAG
       python3 tools/release.py docs TAG [RELEASED...]

`check` exits with a message unless TAG, such as v0.2.0, names the version in pyproject.toml and
CITATION.cff, and CHANGELOG.md has a section for it.

`docs` prints the arguments of `mike deploy`. A release replaces the documentation of those that
differ in the last number only: v0.2.1 that of v0.2.0, as 0.2. The newest one is also `latest`;
RELEASED are the tags to compare with. A pre-release, such as v0.3.0rc1, stands for itself.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
_FINAL = re.compile(r"v(\d+)\.(\d+)\.(\d+)")


def problems(tag: str, root: Path = ROOT) -> list[str]:
    """What keeps a tag from being that of the release in `root`: a sentence each."""
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    found = []
    if tag != f"v{version}":
        found.append(f"The tag must be v{version}, as pyproject.toml says; got {tag}.")
    cited = re.search(r"^version: (\S+)$", (root / "CITATION.cff").read_text(), re.MULTILINE)
    if cited is None or cited[1] != version:
        cited_version = cited[1] if cited else "no version"
        found.append(f"CITATION.cff must say `version: {version}`; got {cited_version}.")
    if not _changes(version, (root / "CHANGELOG.md").read_text()):
        found.append(f"CHANGELOG.md must have a section `## {version}` that lists changes.")
    return found


def mike_arguments(tag: str, released: list[str]) -> list[str]:
    """What follows `mike deploy`."""
    number = _number(tag)
    if number is None:
        return [tag.removeprefix("v")]
    newest = max(filter(None, map(_number, [tag, *released])))
    aliases = ["latest"] if number == newest else []
    return ["--title", tag.removeprefix("v"), f"{number[0]}.{number[1]}", *aliases]


def _changes(version: str, changelog: str) -> bool:
    """Whether the version has a section with a list."""
    for section in re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        if heading.split()[:1] == [version]:
            return re.search(r"^- \S", text, re.MULTILINE) is not None
    return False


def _number(tag: str) -> tuple[int, ...] | None:
    """(0, 2, 1) of v0.2.1; None of a pre-release."""
    final = _FINAL.fullmatch(tag)
    return tuple(map(int, final.groups())) if final else None


def main(command: str, tag: str, *released: str) -> None:
    """Runs a command of the usage above."""
    if command == "docs":
        print(*mike_arguments(tag, list(released)))
        return
    if command != "check":
        sys.exit(f"release.py: the command must be check or docs; got {command}")
    if found := problems(tag):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
