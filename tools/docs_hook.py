# SPDX-License-Identifier: Apache-2.0
"""The hook of mkdocs.yml: gives the site the paths of the repository.

Pages, figures and sources keep their relative paths, so one link works in the site and in a
checkout. The site has README.md, all of docs/, and what these link to. A link to a source becomes
one to a page that shows it, and a link to a folder becomes one to a list of its files.
"""

import ast
import logging
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
from api_signatures import ENTRY  # noqa: E402

# Of sources, which are shown as pages.
_LANGUAGES = {
    ".cc": "c++",
    ".cu": "cuda",
    ".cuh": "cuda",
    ".h": "c++",
    ".py": "python",
    ".sh": "bash",
    ".toml": "toml",
}
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
# Of a page at the top of the site: its own style sheets and scripts.
_ASSET = re.compile(r'<(?:link rel="stylesheet" href|script src)="(?!\w+:|/)([^"?]+)')
# Python-Markdown would read these as text of the item around them; GitHub reads either.
_SHALLOW_ITEM = re.compile(r"^ {1,3}(?:[-*+]|\d+\.) ", re.MULTILINE)

_log = logging.getLogger("mkdocs.hooks.docs")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Moves the pages to docs/, and adds README.md and what all of them link to."""
    root = Path(config.config_file_path).resolve().parent
    own = [file for file in files if file.src_dir == config.docs_dir]
    site = Files([file for file in files if file not in own])  # the theme's
    pages = sorted(Path(file.src_dir or "", file.src_uri).resolve() for file in own)
    pending, seen = [*pages, root / "README.md"], set()
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        site.append(_file(config, path, path.relative_to(root).as_posix()))
        if path.is_dir():
            pending += _files_in(path)
        elif path.suffix == ".md":
            pending += _linked(path, root)
    return site


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Maps links to sources and folders; warns of lists that the site would not nest.

    Leaves out signatures, as mkdocstrings makes its own.
    """
    source = page.file.src_uri
    for item in _SHALLOW_ITEM.finditer(markdown):
        line = markdown.count("\n", 0, item.start()) + 1
        _log.warning("%s:%d: indent a nested list by 4 spaces.", source, line)

    def mapped(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        for suffix in (".md", "/index.md"):
            if files.get_file_from_path(target + suffix):
                return link[1].rstrip("/") + suffix
        return link[1]

    return _LINK.sub(mapped, ENTRY.sub(r"\1", markdown))


def on_post_build(*, config: MkDocsConfig) -> None:
    """Warns of style sheets and scripts that the first page names and the site lacks."""
    site = Path(config.site_dir)
    for name in _ASSET.findall((site / "index.html").read_text()):
        if not (site / name).is_file():
            _log.warning("index.html needs %s, which the site does not have.", name)


def _file(config: MkDocsConfig, path: Path, uri: str) -> File:
    """The page that stands for a file or folder of the repository."""
    if path.is_dir():
        return File.generated(config, f"{uri}/index.md", content=_index(path, uri))
    if path.suffix in _LANGUAGES:
        listing = f"# {uri}\n\n````{_LANGUAGES[path.suffix]}\n{path.read_text()}````\n"
        return File.generated(config, f"{uri}.md", content=listing)
    return File.generated(config, uri, abs_src_path=str(path))


def _linked(page: Path, root: Path) -> Iterator[Path]:
    """The files and folders of the repository that a page links to."""
    for link in _LINK.findall(page.read_text()):
        path = (page.parent / link).resolve()
        if path.is_relative_to(root) and path.exists():
            yield path


def _files_in(folder: Path) -> list[Path]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in found if "__pycache__" not in path.parts)


def _index(folder: Path, title: str) -> str:
    lines = [_entry(path, path.relative_to(folder).as_posix()) for path in _files_in(folder)]
    return "\n".join([f"# {title}", "", *lines, ""])


def _entry(path: Path, name: str) -> str:
    if path.suffix != ".py":
        return f"- [`{name}`]({name})"
    summary = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
    return f"- [`{name}`]({name}): {' '.join(summary.split())}"
