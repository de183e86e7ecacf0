"""Checks that no source file and no function is longer than CONTRIBUTING.md allows.

Usage: check_sizes.py [FILE...]; default: all Python, C++ and CUDA sources. A
function's lines are those from its signature to its end, without the docstring.
"""

import ast
import pathlib
import re
import sys
from collections.abc import Iterator

FOLDERS = ("benchmarks", "examples", "ffi", "jax_ep", "tests", "tools")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
CPP_SUFFIXES = {".h", ".cc", ".cu", ".cuh"}
# What the text before a brace starts with if it opens a scope that may hold functions.
_SCOPE = re.compile(r"(inline |static )*(namespace|class|struct|union|enum|extern)\b")
_TEMPLATE = re.compile(r"^template <[^{}()]*>\s*")
# Comments, literals and preprocessor lines, whose braces are no code. A ' between digits is none.
_NO_CODE = re.compile(
    r"//[^\n]*|/\*.*?\*/|R\"(\w*)\(.*?\)\1\"|\"(?:\\.|[^\"\\\n])*\"|(?<!\w)'(?:\\.|[^'\\\n])+'"
    r"|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*",
    re.DOTALL | re.MULTILINE,
)


def python_functions(source: str) -> Iterator[tuple[str, int, int]]:
    """Yields name, first line and number of lines of each function."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        assert node.end_lineno is not None
        n_lines = node.end_lineno - node.lineno + 1
        first = node.body[0]
        if ast.get_docstring(node, clean=False) is not None:
            assert first.end_lineno is not None
            n_lines -= first.end_lineno - first.lineno + 1
        yield node.name, node.lineno, n_lines


def cpp_functions(source: str) -> Iterator[tuple[str, int, int]]:
    """Yields name, first line and number of lines of each function, lambdas within included.

    Expects the project's format. A function is an outermost pair of braces that follows
    parentheses; a pair that a comma, a parenthesis or another pair follows is an initializer.
    """
    code = _NO_CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), source)
    depth, begin, begin_depth, head_at = 0, None, 0, 0
    for at in (match.start() for match in re.finditer(r"[{};]", code)):
        if code[at] == "{":
            head = _TEMPLATE.sub("", code[head_at:at].strip())
            if begin is None and "(" in head and not _SCOPE.match(head):
                begin, begin_depth = at - len(code[head_at:at].lstrip()), depth
            depth += 1
        elif code[at] == "}":
            depth -= 1
            if begin is not None and depth == begin_depth:
                if code[at + 1 :].lstrip()[:1] in (",", "{", ")"):
                    continue
                name = re.search(
                    r"(operator[^\s\w]+|\b(?!__launch_bounds__)[\w~]+)\(", code[begin:]
                )
                first = code.count("\n", 0, begin) + 1
                yield name[1] if name else "?", first, code.count("\n", begin, at) + 1
                begin = None
        if begin is None:
            head_at = at + 1


def complaints(path: pathlib.Path) -> Iterator[str]:
    """Yields what is too long in one file."""
    source = path.read_text()
    n_lines = source.count("\n")
    if n_lines > MAX_FILE_LINES:
        yield f"{path}: a file must have at most {MAX_FILE_LINES} lines; got {n_lines}"
    functions = cpp_functions if path.suffix in CPP_SUFFIXES else python_functions
    for name, line, length in functions(source):
        if length > MAX_FUNCTION_LINES:
            yield (
                f"{path}:{line}: a function must have at most {MAX_FUNCTION_LINES} lines; "
                f"{name} has {length}"
            )


def sources() -> list[pathlib.Path]:
    """The project's sources."""
    root = pathlib.Path(__file__).parents[1]
    paths = [path for folder in FOLDERS for path in (root / folder).rglob("*")]
    return sorted(path for path in paths if path.suffix in {".py", *CPP_SUFFIXES})


def main(names: list[str]) -> int:
    """Prints what is too long; returns the exit status."""
    paths = [pathlib.Path(name) for name in names] or sources()
    found = [line for path in paths for line in complaints(path)]
    print(*found, sep="\n", end="\n" if found else "")
    print(f"check_sizes: {len(paths)} files, {len(found)} too long")
    return 1 if found or not paths else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
