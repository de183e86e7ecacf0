#!/usr/bin/env bash
# Compiles programs with XLA's compiler for GPUs and checks them (tests/gpu_programs). Needs no GPU.
#
# Usage: tools/gpu_programs.sh VENV [PYTEST_OPTION...]
#
# Installs JAX's CUDA plugin, in the version of VENV's jaxlib, into a separate folder: in VENV
# itself, the plugin would look for GPUs in every test.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1/bin/python
if ! PYTHONSAFEPATH=1 "$python" -c 'import jax_ep._ffi_cuda'; then
  echo "gpu-programs: not run, the package was built without the CUDA kernels"
  exit
fi
version=$("$python" -c 'import jaxlib; print(jaxlib.__version__)')
folder=build/gpu-plugin-$version
if [[ ! -e $folder/.done ]]; then
  rm -rf "$folder"
  "$python" -m pip install --quiet --no-deps --target "$folder" "jax-cuda13-plugin==$version" \
    "jax-cuda13-pjrt==$version" 'nvidia-cuda-nvcc==13.*' 'nvidia-nvvm==13.*'
  touch "$folder/.done"
fi
# PYTHONSAFEPATH: import the installed package, not the sources in this folder.
export PYTHONPATH=$folder PYTHONSAFEPATH=1 JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 JAX_EP_TEST_GPU_PROGRAMS=1
exec "$python" -m pytest -p no:cacheprovider tests/gpu_programs "${@:2}"
