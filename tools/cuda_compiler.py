# SPDX-License-Identifier: Apache-2.0
"""Decides whether the CUDA kernels are built, and by which compiler.

The CMake variable JAX_EP_CUDA says whether: ON, OFF, or AUTO (the default), which is ON if there is
an NVIDIA driver, or if CUDACXX names an nvcc. The compiler is that nvcc, or the one on PATH or in
CUDA_PATH; if there is none, or only one that is too old, that of the CUDA toolkit's wheels, which
the build then requires (the dependency group cuda-toolkit in pyproject.toml).

A build that should have the kernels and cannot fails: pip hides what a successful build prints.
"""

import ctypes
import dataclasses
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

OLDEST_NVCC = (12, 8)  # the first for Blackwell

_PROJECT = Path(__file__).parent.parent
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_WITHOUT_CUDA = "for CPUs alone, build with `-C cmake.define.JAX_EP_CUDA=OFF`"


@dataclasses.dataclass(frozen=True)
class Nvcc:
    """An nvcc. `version`: None if it does not tell; `named`: by CUDACXX or CMAKE_CUDA_COMPILER."""

    path: str
    version: tuple[int, int] | None
    named: bool = False

    @property
    def is_usable(self) -> bool:
        """Whether it is new enough for the kernels."""
        return self.version is not None and self.version >= OLDEST_NVCC

    def __str__(self) -> str:
        version = "of unknown version" if self.version is None else dotted(self.version)
        return f"{self.path} ({version})"


@dataclasses.dataclass(frozen=True)
class Driver:
    """An NVIDIA driver. `cuda`: the newest CUDA version that it supports, None if unknown."""

    cuda: tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """The compiler of the kernels, if there is one. `message`: one line for the user."""

    compiler: Literal["none", "nvcc", "wheels"]
    message: str
    cuda: tuple[int, int] | None = None  # version of the compiler


def plan(config_settings: Mapping[str, Any] | None = None) -> Plan:
    """Looks for a driver and an nvcc, and decides. `config_settings`: those of pip.

    Raises SystemExit, with a message, if the kernels should be built and cannot be.
    """
    definitions = cmake_definitions(config_settings)
    mode = requested(definitions)
    if mode == "OFF":
        return decide(mode, None, None)
    return decide(mode, find_nvcc(definitions), find_driver())


def decide(mode: str, nvcc: Nvcc | None, driver: Driver | None) -> Plan:
    """The decision for what the user asked for and what the machine has; see `plan`."""
    if mode == "OFF":
        return Plan("none", "building for CPUs alone, because JAX_EP_CUDA is OFF")
    asked = mode == "ON" or (nvcc is not None and nvcc.named)
    if driver is None and not asked:
        return Plan(
            "none",
            "building for CPUs alone, because there is no NVIDIA driver; with the CUDA kernels: "
            "`-C cmake.define.JAX_EP_CUDA=ON`",
        )
    if nvcc is not None and nvcc.is_usable:
        return Plan("nvcc", f"building the CUDA kernels with {nvcc}", nvcc.version)
    if nvcc is not None and nvcc.named:
        raise SystemExit(
            f"CUDACXX or CMAKE_CUDA_COMPILER must name an nvcc of CUDA {dotted(OLDEST_NVCC)} or "
            f"later; got {nvcc}. Name another; or name none, to take the compiler from the CUDA "
            f"toolkit's wheels; or, {_WITHOUT_CUDA}."
        )
    toolkit = toolkit_version()
    if mode == "AUTO" and driver is not None and driver.cuda is not None and driver.cuda < toolkit:
        raise SystemExit(
            f"The NVIDIA driver must support CUDA {dotted(toolkit)}, the version of the toolkit's "
            f"wheels; it supports {dotted(driver.cuda)}. Update the driver; or install a CUDA 12 "
            f"toolkit, {dotted(OLDEST_NVCC)} or later, and put its nvcc on PATH; or, "
            f"{_WITHOUT_CUDA}."
        )
    message = f"building the CUDA kernels with nvcc {dotted(toolkit)} from the toolkit's wheels"
    if nvcc is not None:
        message += f", because {nvcc} is not of {dotted(OLDEST_NVCC)} or later"
    return Plan("wheels", message, toolkit)


def requirements(config_settings: Mapping[str, Any] | None = None) -> list[str]:
    """The requirements of the build beyond pyproject.toml's list, to compile the kernels."""
    found = plan(config_settings)
    if found.cuda is None:
        return []
    needed = dependency_group("cuda-build")
    if not os.environ.get("JAX_EP_NVSHMEM_DIR"):
        needed += dependency_group(f"nvshmem-cu{found.cuda[0]}", default=[])
    if os.environ.get("JAX_EP_CUTLASS_INCLUDE_DIR"):
        needed = [r for r in needed if not r.startswith("nvidia-cutlass")]
    return needed + (dependency_group("cuda-toolkit") if found.compiler == "wheels" else [])


def configure(config_settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns pip's settings with what CMake must know; sets environment variables for nvcc.

    Raises SystemExit, with a message, if the kernels should be built and cannot be.
    """
    found = plan(config_settings)
    settings = _without_prefix(config_settings)
    settings["cmake.define.JAX_EP_CUDA"] = "OFF" if found.compiler == "none" else "ON"
    if found.compiler == "wheels":
        toolkit = toolkit_folder()
        os.environ["CUDACXX"] = str(toolkit / "bin/nvcc")
        libraries = [str(toolkit / "lib"), os.environ.get("LIBRARY_PATH", "")]
        os.environ["LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
        # Wheels have no libcudart.so, the name that CMake looks for.
        settings["cmake.define.CUDA_CUDART"] = str(next((toolkit / "lib").glob("libcudart.so.*")))
    print(f"jax_ep: {found.message}", flush=True)
    return settings


def requested(definitions: Mapping[str, str]) -> str:
    """JAX_EP_CUDA: AUTO, ON or OFF."""
    mode = definitions.get("JAX_EP_CUDA", "AUTO")
    if mode.upper() not in ("AUTO", "ON", "OFF"):
        raise SystemExit(f"JAX_EP_CUDA must be AUTO, ON or OFF; got {mode}.")
    return mode.upper()


def cmake_definitions(config_settings: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The variables that the user defines for CMake, where scikit-build-core looks for them.

    JAX_EP_CUDA may be an environment variable, too; all others override it.
    """
    pairs = [p.partition("=") for p in os.environ.get("SKBUILD_CMAKE_DEFINE", "").split(";")]
    mode = os.environ.get("JAX_EP_CUDA")
    definitions = {"JAX_EP_CUDA": mode} if mode else {}
    definitions |= {name: value for name, _, value in pairs}
    for key, value in _without_prefix(config_settings).items():
        if key.startswith("cmake.define."):
            definitions[key.removeprefix("cmake.define.")] = str(value)
    # CMake reads these last.
    for argument in shlex.split(os.environ.get("CMAKE_ARGS", "")):
        if match := re.fullmatch(r"-D(\w+)(?::\w+)?=(.*)", argument):
            definitions[match[1]] = match[2]
    return definitions


def find_nvcc(definitions: Mapping[str, str]) -> Nvcc | None:
    """The nvcc that CMake would find; raises SystemExit if the user names one and there is none."""
    named = definitions.get("CMAKE_CUDA_COMPILER") or os.environ.get("CUDACXX")
    folders = [os.environ.get("PATH", ""), os.environ.get("CUDA_PATH", "") + "/bin"]
    path = shutil.which(named or "nvcc", path=os.pathsep.join(folders))
    if path is None:
        if named:
            raise SystemExit(
                f"CUDACXX or CMAKE_CUDA_COMPILER must name an nvcc; there is no {named}. Name "
                "another; or name none, to take the compiler from the CUDA toolkit's wheels."
            )
        return None
    return Nvcc(path, _version_of(path), bool(named))


def find_driver() -> Driver | None:
    """The NVIDIA driver, if there is one; it may be without its library, as in a container."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Driver(None) if _DRIVER_FILE.exists() else None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return Driver(None)
    return Driver((number.value // 1000, number.value % 1000 // 10))


def toolkit_folder() -> Path:
    """Where the CUDA toolkit's wheels are installed; raises SystemExit if a part is missing."""
    parts = [
        "bin/nvcc",
        "include/cccl/cuda/atomic",
        "include/crt/host_config.h",
        "include/cuda_runtime.h",
        "lib/libcudart_static.a",
        "nvvm/bin/cicc",
    ]
    spec = importlib.util.find_spec("nvidia")
    packages = [Path(p) for p in spec.submodule_search_locations or []] if spec else []
    toolkits = [package / f"cu{toolkit_version()[0]}" for package in packages]
    missing = parts
    for toolkit in toolkits:
        missing = [part for part in parts if not (toolkit / part).exists()]
        if not missing:
            return toolkit
    raise SystemExit(
        "The CUDA kernels need a compiler: there is no nvcc of CUDA "
        f"{dotted(OLDEST_NVCC)} or later on PATH, in CUDA_PATH or in CUDACXX, and this environment "
        f"lacks parts of the CUDA toolkit's wheels: {', '.join(missing)}. Build with isolation "
        f"(pip's default), or run `pip install '{dependency_group('cuda-toolkit')[0]}'` first, or "
        f"install a CUDA toolkit; or, {_WITHOUT_CUDA}."
    )


def toolkit_version() -> tuple[int, int]:
    """The CUDA version of the toolkit's wheels."""
    (requirement,) = dependency_group("cuda-toolkit")
    major, minor = re.findall(r"==(\d+)\.(\d+)", requirement)[0]
    return int(major), int(minor)


def dependency_group(name: str, default: list[str] | None = None) -> list[str]:
    """A dependency group of pyproject.toml; without a default, there must be one of that name."""
    groups = tomllib.loads((_PROJECT / "pyproject.toml").read_text())["dependency-groups"]
    return groups[name] if default is None else groups.get(name, default)


def dotted(version: tuple[int, int]) -> str:
    """(12, 8) as 12.8."""
    return f"{version[0]}.{version[1]}"


def _version_of(nvcc: str) -> tuple[int, int] | None:
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return None
    match = re.search(r"release (\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def _without_prefix(config_settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """scikit-build-core takes settings with and without its prefix."""
    return {key.removeprefix("skbuild."): value for key, value in (config_settings or {}).items()}
