"""tools/cuda_compiler.py: whether the CUDA kernels are built, by which compiler, and why not."""

import importlib
import os
import pathlib
import re
import stat
import sys
import types

import pytest

ROOT = pathlib.Path(__file__).parents[2]
HEADERS, CMAKE = "nvidia-cutlass==4.2.*", "cmake>=4.1"
NVSHMEM = "nvidia-nvshmem-cu13==3.4.5"
TOOLKIT = "cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.0.*"
PARTS = [
    "bin/nvcc",
    "include/cccl/cuda/atomic",
    "include/crt/host_config.h",
    "include/cuda_runtime.h",
    "lib/libcudart_static.a",
    "nvvm/bin/cicc",
]
NEW, OLD, BROKEN = "13.0", "11.8", None


@pytest.fixture
def compiler(monkeypatch):
    """The module, on a machine without nvcc, driver and settings."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    module = importlib.import_module("cuda_compiler")
    for name in (
        "CMAKE_ARGS",
        "CUDACXX",
        "CUDA_PATH",
        "JAX_EP_CUTLASS_INCLUDE_DIR",
        "JAX_EP_NVSHMEM_DIR",
        "LIBRARY_PATH",
        "SKBUILD_CMAKE_DEFINE",
        "JAX_EP_CUDA",
    ):
        monkeypatch.setenv(name, "")  # so that what the tests set is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(module, "find_driver", lambda: None)
    return module


def settings(mode: str) -> dict[str, str]:
    return {"cmake.define.JAX_EP_CUDA": mode}


def write_nvcc(folder: pathlib.Path, version: str | None) -> str:
    """Writes a program that prints what nvcc of that version prints; None: an error."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "nvcc"
    text = f"echo 'Cuda compilation tools, release {version}, V{version}.88'"
    path.write_text(f"#!/bin/sh\n{'exit 1' if version is None else text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def write_toolkit(folder: pathlib.Path, without: str | None = None) -> pathlib.Path:
    """Writes the files of the toolkit's wheels, all but one."""
    toolkit = folder / "nvidia" / "cu13"
    for part in [*PARTS, "lib/libcudart.so.13"]:
        if part != without:
            (toolkit / part).parent.mkdir(parents=True, exist_ok=True)
            (toolkit / part).touch()
    return toolkit


def use_packages(monkeypatch, folder: pathlib.Path) -> None:
    """Makes `nvidia` a package that is in `folder`, and nowhere else."""
    packages = [str(folder / "nvidia")]
    spec = types.SimpleNamespace(submodule_search_locations=packages)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)


# mode, nvcc on PATH, is there a driver: what compiles the kernels.
DECISIONS = [
    ("AUTO", "", False, "none"),
    ("AUTO", "", True, "wheels"),
    ("AUTO", NEW, False, "none"),
    ("AUTO", NEW, True, "nvcc"),
    ("AUTO", OLD, False, "none"),
    ("AUTO", OLD, True, "wheels"),
    ("AUTO", BROKEN, True, "wheels"),
    ("ON", "", False, "wheels"),
    ("ON", "", True, "wheels"),
    ("ON", NEW, False, "nvcc"),
    ("ON", NEW, True, "nvcc"),
    ("ON", OLD, False, "wheels"),
    ("ON", OLD, True, "wheels"),
    ("OFF", "", False, "none"),
    ("OFF", "", True, "none"),
    ("OFF", NEW, False, "none"),
    ("OFF", NEW, True, "none"),
    ("OFF", OLD, True, "none"),
]
REQUIREMENTS = {
    "none": [],
    "nvcc": [HEADERS, CMAKE, NVSHMEM],
    "wheels": [HEADERS, CMAKE, NVSHMEM, TOOLKIT],
}


@pytest.mark.parametrize("mode, nvcc, driver, expected", DECISIONS)
def test_the_build_requires_what_the_decision_needs(
    compiler, monkeypatch, tmp_path, mode, nvcc, driver, expected
):
    if nvcc != "":
        write_nvcc(tmp_path, nvcc)
        monkeypatch.setenv("PATH", str(tmp_path))
    if driver:
        monkeypatch.setattr(compiler, "find_driver", lambda: compiler.Driver((13, 0)))
    assert compiler.plan(settings(mode)).compiler == expected
    assert compiler.requirements(settings(mode)) == REQUIREMENTS[expected]
    if mode == "AUTO":
        assert compiler.requirements() == REQUIREMENTS[expected]


@pytest.mark.parametrize("mode", ["off", "Off", "on", "On", "auto"])
def test_modes_may_have_any_letter_case(compiler, mode):
    expected = {"on": "wheels"}.get(mode.lower(), "none")
    assert compiler.plan(settings(mode)).compiler == expected


@pytest.mark.parametrize("mode", ["yes", "1", ""])
def test_other_modes_are_rejected(compiler, mode):
    with pytest.raises(SystemExit, match=f"must be AUTO, ON or OFF; got {mode}"):
        compiler.plan(settings(mode))


def test_off_never_looks(compiler, monkeypatch):
    def look(*_):
        raise AssertionError("looked")

    monkeypatch.setattr(compiler, "find_nvcc", look)
    monkeypatch.setattr(compiler, "find_driver", look)
    assert compiler.requirements(settings("off")) == []
    assert compiler.configure(settings("off")) == settings("OFF")


def test_the_mode_is_found_wherever_it_may_be_set(compiler, monkeypatch):
    """The later of these wins, as with scikit-build-core."""

    def mode(config_settings=None):
        return compiler.requested(compiler.cmake_definitions(config_settings))

    assert mode() == "AUTO"
    monkeypatch.setenv("JAX_EP_CUDA", "on")
    assert mode() == "ON"
    monkeypatch.setenv("SKBUILD_CMAKE_DEFINE", "A=1;JAX_EP_CUDA=OFF")
    assert mode() == "OFF"
    assert mode({"skbuild.cmake.define.JAX_EP_CUDA": "ON"}) == "ON"
    monkeypatch.setenv("CMAKE_ARGS", "-DA='b c' -DJAX_EP_CUDA:STRING=AUTO")
    assert mode(settings("ON")) == "AUTO"


@pytest.mark.parametrize("variable", ["CUDACXX", "CUDA_PATH"])
def test_variables_may_name_the_compiler(compiler, monkeypatch, tmp_path, variable):
    nvcc = write_nvcc(tmp_path / "bin", NEW)
    monkeypatch.setenv(variable, nvcc if variable == "CUDACXX" else str(tmp_path))
    is_named = variable == "CUDACXX"
    assert compiler.find_nvcc({}) == compiler.Nvcc(nvcc, (13, 0), is_named)
    assert compiler.plan(settings("ON")).compiler == "nvcc"
    assert compiler.plan().compiler == ("nvcc" if is_named else "none")  # where no GPU is


def test_headers_of_ones_own_are_not_required(compiler, monkeypatch):
    monkeypatch.setenv("JAX_EP_CUTLASS_INCLUDE_DIR", "/headers")
    assert compiler.requirements(settings("ON")) == [CMAKE, NVSHMEM, TOOLKIT]
    monkeypatch.setenv("JAX_EP_NVSHMEM_DIR", "/nvshmem")
    assert compiler.requirements(settings("ON")) == [CMAKE, TOOLKIT]


def test_nvshmem_is_that_of_the_compiler(compiler, monkeypatch, tmp_path):
    write_nvcc(tmp_path, "12.9")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert NVSHMEM.replace("cu13", "cu12") in compiler.requirements(settings("ON"))
    write_nvcc(tmp_path, "14.0")  # for which there is none
    assert compiler.requirements(settings("ON")) == [HEADERS, CMAKE]


def test_a_named_compiler_must_exist_and_be_new_enough(compiler, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDACXX", "/nowhere/nvcc")
    with pytest.raises(SystemExit, match="there is no /nowhere/nvcc"):
        compiler.plan()
    monkeypatch.setenv("CUDACXX", write_nvcc(tmp_path, OLD))
    with pytest.raises(SystemExit, match=r"12\.8 or later; got .*/nvcc \(11\.8\)"):
        compiler.plan(settings("ON"))
    definitions = {"cmake.define.CMAKE_CUDA_COMPILER": write_nvcc(tmp_path, BROKEN)}
    with pytest.raises(SystemExit, match="of unknown version"):
        compiler.plan(definitions)


def test_auto_refuses_a_driver_that_cannot_run_what_the_wheels_compile(compiler, monkeypatch):
    monkeypatch.setattr(compiler, "find_driver", lambda: compiler.Driver((12, 4)))
    with pytest.raises(SystemExit, match=r"must support CUDA 13\.0.* it supports 12\.4.*OFF"):
        compiler.plan()
    assert compiler.plan(settings("ON")).compiler == "wheels"  # for another machine
    assert compiler.plan(settings("OFF")).compiler == "none"
    monkeypatch.setattr(compiler, "find_driver", lambda: compiler.Driver(None))
    assert compiler.plan().compiler == "wheels"


def test_a_line_says_what_is_built(compiler, monkeypatch, tmp_path, capsys):
    assert compiler.configure() == settings("OFF")
    assert capsys.readouterr().out == (
        "jax_ep: building for CPUs alone, because there is no NVIDIA driver; with the CUDA "
        "kernels: `-C cmake.define.JAX_EP_CUDA=ON`\n"
    )
    nvcc = write_nvcc(tmp_path, NEW)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compiler, "find_driver", lambda: compiler.Driver((13, 0)))
    assert compiler.configure({"build-dir": "b"}) == settings("ON") | {"build-dir": "b"}
    assert f"with {nvcc} (13.0)\n" in capsys.readouterr().out
    write_nvcc(tmp_path, OLD)
    use_packages(monkeypatch, write_toolkit(tmp_path / "site").parents[1])
    compiler.configure()
    assert f"wheels, because {nvcc} (11.8) is not of 12.8 or later\n" in capsys.readouterr().out


def test_cmake_gets_the_compiler_of_the_wheels(compiler, monkeypatch, tmp_path):
    toolkit = write_toolkit(tmp_path)
    use_packages(monkeypatch, tmp_path)
    monkeypatch.setenv("LIBRARY_PATH", "/mine")
    cudart = {"cmake.define.CUDA_CUDART": str(toolkit / "lib/libcudart.so.13")}
    assert compiler.configure(settings("ON")) == settings("ON") | cudart
    assert os.environ["CUDACXX"] == str(toolkit / "bin/nvcc")
    assert os.environ["LIBRARY_PATH"] == f"{toolkit}/lib:/mine"


@pytest.mark.parametrize("part", PARTS)
def test_an_incomplete_toolkit_is_an_error_that_says_what_to_do(
    compiler, monkeypatch, tmp_path, part
):
    """Without isolation: pip installs no requirements."""
    write_toolkit(tmp_path, without=part)
    use_packages(monkeypatch, tmp_path)
    what_to_do = re.escape(f"{part}. Build with isolation (pip's default), or run `pip install '")
    with pytest.raises(SystemExit, match=what_to_do + re.escape(TOOLKIT)):
        compiler.configure(settings("ON"))


def test_no_toolkit_is_an_error_that_says_what_to_do(compiler, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="The CUDA kernels need a compiler: there is no nvcc"):
        compiler.configure(settings("ON"))


def test_the_driver_is_found_by_its_library_or_its_file(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    module = importlib.import_module("cuda_compiler")

    class Library:
        def __init__(self, name):
            assert name == "libcuda.so.1"

        def cuDriverGetVersion(self, number):  # noqa: N802 (CUDA's name)
            number._obj.value = 12040
            return self.status

    Library.status = 0
    monkeypatch.setattr("ctypes.CDLL", Library)
    assert module.find_driver() == module.Driver((12, 4))
    Library.status = 34  # CUDA_ERROR_STUB_LIBRARY
    assert module.find_driver() == module.Driver(None)

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    monkeypatch.setattr(module, "_DRIVER_FILE", tmp_path / "version")
    assert module.find_driver() is None
    (tmp_path / "version").touch()
    assert module.find_driver() == module.Driver(None)


def test_cmake_requires_the_same_version_of_nvcc(compiler):
    text = (ROOT / "CMakeLists.txt").read_text()
    assert f"VERSION_LESS {compiler.dotted(compiler.OLDEST_NVCC)})" in text


def test_the_backend_adds_to_scikit_build_core(compiler, monkeypatch):
    """The hooks, with a stand-in for scikit-build-core that returns what it gets."""
    build = types.ModuleType("scikit_build_core.build")
    for kind in ("wheel", "editable"):
        setattr(build, f"get_requires_for_build_{kind}", lambda settings: ["ninja"])
        setattr(build, f"build_{kind}", lambda *arguments: arguments)
        setattr(build, f"prepare_metadata_for_build_{kind}", None)
    build.build_sdist = build.get_requires_for_build_sdist = None
    package = types.ModuleType("scikit_build_core")
    package.build = build
    monkeypatch.setitem(sys.modules, "scikit_build_core", package)
    monkeypatch.setitem(sys.modules, "scikit_build_core.build", build)
    monkeypatch.delitem(sys.modules, "build_backend", raising=False)
    backend = importlib.import_module("build_backend")
    monkeypatch.delitem(sys.modules, "build_backend")
    for kind in ("wheel", "editable"):
        required = getattr(backend, f"get_requires_for_build_{kind}")(settings("on"))
        assert required == ["ninja", HEADERS, CMAKE, NVSHMEM, TOOLKIT]
        assert getattr(backend, f"get_requires_for_build_{kind}")() == ["ninja"]
        built = getattr(backend, f"build_{kind}")("folder", None, "metadata")
        assert built == ("folder", settings("OFF"), "metadata")
