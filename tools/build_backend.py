# SPDX-License-Identifier: Apache-2.0
"""The build backend: scikit-build-core, with a compiler and CUTLASS if it builds CUDA kernels.

cuda_compiler.py decides whether it does.
"""

from typing import Any

import cuda_compiler
from scikit_build_core import build as scikit_build
from scikit_build_core.build import (
    build_sdist,
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
    return requirements + cuda_compiler.requirements(config_settings)


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    """Returns the requirements, as pip expects them."""
    requirements = scikit_build.get_requires_for_build_editable(config_settings)
    return requirements + cuda_compiler.requirements(config_settings)


def build_wheel(folder: str, config_settings: dict | None = None, *options: Any) -> str:
    """Builds a wheel in `folder`; returns its name."""
    return scikit_build.build_wheel(folder, cuda_compiler.configure(config_settings), *options)


def build_editable(folder: str, config_settings: dict | None = None, *options: Any) -> str:
    """Builds an editable wheel in `folder`; returns its name."""
    return scikit_build.build_editable(folder, cuda_compiler.configure(config_settings), *options)
