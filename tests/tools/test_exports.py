"""The extensions' exports: the function that Python calls, and nothing else.

The loader would bind any other symbol to the definition of another library, or another library's
to ours; unique symbols even across dlopen's RTLD_LOCAL. ffi/exports.cmake says what that breaks.
"""

import ctypes
import importlib.util
import pathlib
import struct

import pytest

DYNAMIC_SYMBOLS = 11  # SHT_DYNSYM
UNDEFINED = 0  # SHN_UNDEF
GLOBAL, UNIQUE = 1, 10  # STB_GLOBAL, STB_GNU_UNIQUE
UNIQUE_SYMBOL = "_ZNSt7num_putIcSt19ostreambuf_iteratorIcSt11char_traitsIcEEE2idE"


def defined_symbols(path: pathlib.Path) -> dict[str, int]:
    """The dynamic symbols that an ELF64 library defines, except local ones: name -> binding."""
    data = path.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01", f"{path} must be a little-endian ELF64 file"
    (first_section,) = struct.unpack_from("<Q", data, 0x28)
    section_bytes, n_sections = struct.unpack_from("<HH", data, 0x3A)
    # name, type, flags, address, offset, size, link, info, alignment, entry size
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", data, first_section + i * section_bytes)
        for i in range(n_sections)
    ]
    (table,) = [section for section in sections if section[1] == DYNAMIC_SYMBOLS]
    _, _, _, _, names, names_bytes, *_ = sections[table[6]]
    strings = data[names : names + names_bytes]
    symbols = {}
    for name, info, _, section, _, _ in struct.iter_unpack(
        "<IBBHQQ", data[table[4] : table[4] + table[5]]
    ):
        if section != UNDEFINED and info >> 4:
            symbols[strings[name : strings.index(b"\0", name)].decode()] = info >> 4
    return symbols


@pytest.mark.parametrize("name", ["_ffi", "_ffi_cuda"])
def test_an_extension_exports_its_init_function_alone(name):
    spec = importlib.util.find_spec(f"jax_ep.{name}")
    if spec is None and name == "_ffi_cuda":
        pytest.skip("the package was built without the CUDA kernels")
    assert defined_symbols(pathlib.Path(spec.origin)) == {f"PyInit_{name}": GLOBAL}


def test_unique_symbols_are_found_where_there_are_some():
    ctypes.CDLL("libstdc++.so.6")
    maps = pathlib.Path("/proc/self/maps").read_text().split()
    library = next(pathlib.Path(path) for path in maps if "/libstdc++.so" in path)
    symbols = defined_symbols(library)
    assert len(symbols) > 1000
    assert symbols[UNIQUE_SYMBOL] == UNIQUE
