# SPDX-License-Identifier: Apache-2.0
"""Prints the folder of NVSHMEM's wheel in this environment, if it fits the version of nvcc.

Usage: find_nvshmem.py 13.0.88
"""

import importlib.metadata
import importlib.util
import sys


def find(cuda_version: str) -> str:
    """The folder, or '' without a wheel for this major version of CUDA."""
    try:
        importlib.metadata.distribution(f"nvidia-nvshmem-cu{cuda_version.split('.')[0]}")
        spec = importlib.util.find_spec("nvidia.nvshmem")
    except (importlib.metadata.PackageNotFoundError, ModuleNotFoundError):
        return ""
    return str(spec.submodule_search_locations[0]) if spec else ""


if __name__ == "__main__":
    print(find(sys.argv[1]))
