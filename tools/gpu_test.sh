#!/usr/bin/env bash
# Builds the package on a machine with GPUs and runs the suite on transport p2p.
#
# Usage: tools/gpu_test.sh LOG_FOLDER [CUDA_ARCHITECTURE]        default: 90
#
# Takes python3 as it is (jax with CUDA, pytest, scikit-build-core, nanobind, nvcc): nothing
# is downloaded. Every step has a limit.
set -uo pipefail
cd "$(dirname "$0")/.."
logs=$1 arch=${2:-90} site=build/gpu-site
mkdir -p "$logs"

{
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  python3 -c 'import jax, sys; print("jax", jax.__version__, "python", sys.version.split()[0])'
  timeout 200 python3 -m pip install --quiet --no-build-isolation --no-deps --upgrade \
    -C "cmake.define.CMAKE_CUDA_ARCHITECTURES=$arch" -C cmake.define.JAX_EP_CUDA=ON \
    --target "$site" .
} 2>&1 | tee "$logs/gpu_setup.txt"

status=0
export PYTHONPATH=$PWD/$site PYTHONSAFEPATH=1
for tests in test_dispatch_combine test_grad "test_transforms test_independence"; do
  # shellcheck disable=SC2086
  timeout 120 python3 -m pytest -p no:cacheprovider --gpu --transports p2p \
    $(printf 'tests/%s.py ' $tests) > "$logs/gpu_${tests// /_}.txt" 2>&1 || status=1
  echo "== $tests"
  tail -n 12 "$logs/gpu_${tests// /_}.txt"
done

echo "== quantize_test"
{
  timeout 120 nvcc -std=c++17 -O3 -I ffi -arch="sm_$arch" -Xcompiler -ffp-contract=off \
    ffi/tests/quantize_test.cu ffi/cpu/encode.cc -o build/quantize_test &&
    timeout 60 build/quantize_test
} > "$logs/gpu_quantize.txt" 2>&1 || status=1
tail -n 12 "$logs/gpu_quantize.txt"
exit $status
