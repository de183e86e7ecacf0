# SPDX-License-Identifier: Apache-2.0
"""The hook of mkdocs.yml: gives the site the paths of the repository.

Pages, figures and sources keep their relative paths, so one link works in the site and in a
checkout. MkDocs knows pages and other files only. So a link to a source becomes one to a page that
shows it, and a link to a folder becomes one to a list of its files.
"""

import ast
import logging
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# What the pages may link to, besides each other.
COPIED = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    "benchmarks/results/*",
)
SOURCES = ("examples/**/*.py", "examples/**/*.sh", "jax_ep/*.py")
FOLDERS = ("examples", "benchmarks/results")

_LANGUAGES = {".py": "python", ".sh": "bash"}
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
# Python-Markdown would read these as text of the item around them; GitHub reads either.
_SHALLOW_ITEM = re.compile(r"^ {1,3}(?:[-*+]|\d+\.) ", re.MULTILINE)

_log = logging.getLogger("mkdocs.hooks.docs")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Moves the pages to docs/ and adds what they link to."""
    root = _root(config)
    repository = Files([file for file in files if file.abs_src_path is None])  # the theme's
    copied = [Path(file.abs_src_path) for file in files if file.abs_src_path is not None]
    for path in [*copied, *_glob(root, COPIED)]:
        uri = path.relative_to(root).as_posix()
        repository.append(File.generated(config, uri, abs_src_path=str(path)))
    for path in _glob(root, SOURCES):
        uri = path.relative_to(root).as_posix()
        repository.append(File.generated(config, f"{uri}.md", content=_listing(path, uri)))
    for folder in FOLDERS:
        content = _index(root / folder, folder)
        repository.append(File.generated(config, f"{folder}/index.md", content=content))
    return repository


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Maps links to sources and folders; warns of lists that the site would not nest."""
    source = page.file.src_uri
    for item in _SHALLOW_ITEM.finditer(markdown):
        line = markdown.count("\n", 0, item.start()) + 1
        _log.warning("%s:%d: indent a nested list by 4 spaces.", source, line)
    folder = posixpath.dirname(source)

    def mapped(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        if target in FOLDERS:
            return f"{link[1].rstrip('/')}/index.md"
        return f"{link[1]}.md" if files.get_file_from_path(f"{target}.md") else link[1]

    return _LINK.sub(mapped, markdown)


def _root(config: MkDocsConfig) -> Path:
    return Path(config.config_file_path).parent


def _glob(root: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted(path for pattern in patterns for path in root.glob(pattern))


def _listing(path: Path, uri: str) -> str:
    return f"# {uri}\n\n````{_LANGUAGES[path.suffix]}\n{path.read_text()}````\n"


def _index(folder: Path, title: str) -> str:
    paths = [path for path in folder.rglob("*") if path.suffix and "__pycache__" not in path.parts]
    lines = [_entry(path, path.relative_to(folder).as_posix()) for path in sorted(paths)]
    return "\n".join([f"# {title}", "", *lines, ""])


def _entry(path: Path, name: str) -> str:
    if path.suffix != ".py":
        return f"- [`{name}`]({name})"
    summary = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
    return f"- [`{name}`]({name}): {' '.join(summary.split())}"
