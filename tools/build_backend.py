# SPDX-License-Identifier: Apache-2.0
"""The build backend: scikit-build-core, which also requires CUTLASS if it will build CUDA kernels.

CMake builds them (CMakeLists.txt) unless JAX_EP_CUDA is OFF or there is no nvcc.
"""

import os
import re
import shutil
import tomllib
from pathlib import Path

from scikit_build_core import build as scikit_build
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    """Returns the requirements, as pip expects them."""
    requirements = scikit_build.get_requires_for_build_wheel(config_settings)
    return requirements + _cuda_requirements(config_settings or {})


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    """Returns the requirements, as pip expects them."""
    requirements = scikit_build.get_requires_for_build_editable(config_settings)
    return requirements + _cuda_requirements(config_settings or {})


def _cuda_requirements(config_settings: dict) -> list[str]:
    """Returns none if CMake will not look for nvcc or CUTLASS, or not find nvcc."""
    if os.environ.get("JAX_EP_CUTLASS_INCLUDE_DIR"):
        return []
    definitions = dict(re.findall(r"-D(\w+)(?::\w+)?=(\S*)", os.environ.get("CMAKE_ARGS", "")))
    cuda = config_settings.get("cmake.define.JAX_EP_CUDA", definitions.get("JAX_EP_CUDA"))
    folders = [os.environ.get("PATH", ""), os.environ.get("CUDA_PATH", "") + "/bin"]
    nvcc = shutil.which(os.environ.get("CUDACXX") or "nvcc", path=os.pathsep.join(folders))
    if cuda == "OFF" or nvcc is None:
        return []
    pyproject = tomllib.loads(Path("pyproject.toml").read_text())
    return pyproject["dependency-groups"]["cuda-build"]
