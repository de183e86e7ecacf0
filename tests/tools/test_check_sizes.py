"""tools/check_sizes.py finds files and functions that are too long."""

import importlib.util
import pathlib

import pytest

_PATH = pathlib.Path(__file__).parents[2] / "tools" / "check_sizes.py"
_SPEC = importlib.util.spec_from_file_location("check_sizes", _PATH)
check_sizes = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(check_sizes)

CPP = """
#define LONG(x) { /* one { more */ }
namespace jax_ep {
constexpr int kTable[] = {Size(1), 2};
// A comment with a brace: {
struct Config {
  int Get(char c) const { return c == '{' ? 1'000 : 2; }
  Config(const Options& options = {}, std::vector<int> more = {})
      : values_{options.a, options.b},
        more_(std::move(more)) {
    values_.push_back([&] { return 1; }());
  }
  std::vector<int> values_;
};
template <class T>
__global__ void __launch_bounds__(kThreads)
    Kernel(const T* data) {
  if (data) {
    Use("}");
  }
}
bool operator==(const Config& a, const Config& b) {
  return true;
}
}  // namespace jax_ep
"""


def test_functions_of_cpp_are_found_with_their_lines():
    found = list(check_sizes.cpp_functions(CPP))
    assert found == [("Get", 7, 1), ("Config", 8, 5), ("Kernel", 15, 7), ("operator==", 22, 3)]


def test_functions_of_python_are_counted_without_docstrings():
    source = 'def f():\n    """One.\n\n    More.\n    """\n    return [\n        1,\n    ]\n'
    assert list(check_sizes.python_functions(source)) == [("f", 1, 4)]


@pytest.mark.parametrize(
    ("name", "line", "head", "end"),
    [("a.py", "    x = 1\n", "def f():\n", ""), ("a.cc", "  x = 1;\n", "void f() {\n", "}\n")],
)
def test_what_is_too_long_is_named(name, line, head, end, tmp_path, capsys):
    path = tmp_path / name
    longest = 60 - head.count("\n") - end.count("\n")
    path.write_text(head + line * longest + end)
    assert check_sizes.main([str(path)]) == 0
    path.write_text("\n" * 340 + head + line * longest + end)
    assert check_sizes.main([str(path)]) == 0
    path.write_text("\n" * 340 + head + line * (longest + 1) + end)
    assert check_sizes.main([str(path)]) == 1
    printed = capsys.readouterr().out
    assert f"{path}: a file must have at most 400 lines; got 401" in printed
    assert f"{path}:341: a function must have at most 60 lines; f has 61" in printed


def test_the_sources_of_the_project_are_checked():
    root = _PATH.parents[1]
    names = {path.relative_to(root).as_posix() for path in check_sizes.sources()}
    assert {
        "jax_ep/ops.py",
        "ffi/modules/host.cc",
        "ffi/core/routing.h",
        "tests/support/suite.py",
    } <= names
    assert len(names) > 400
    assert check_sizes.main([]) == 0
