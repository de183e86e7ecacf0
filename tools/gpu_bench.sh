#!/usr/bin/env bash
# Builds the package on a machine with GPUs and runs the GPU benchmark.
#
# Usage: tools/gpu_bench.sh LOG_FOLDER [BENCHMARK_OPTION...]
#
# Takes python3 as it is (jax with CUDA, scikit-build-core, nanobind, nvcc): nothing is
# downloaded. Leaves gpu_*.json and the log in LOG_FOLDER; the file is written after each
# measurement. Environment: CUDA_ARCHITECTURE (90), BENCH_SECONDS (380).
set -uo pipefail
cd "$(dirname "$0")/.."
logs=$1 arch=${CUDA_ARCHITECTURE:-90} seconds=${BENCH_SECONDS:-380} site=build/gpu-site
shift
mkdir -p "$logs"

{
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  timeout 200 python3 -m pip install --quiet --no-build-isolation --no-deps --upgrade \
    -C "cmake.define.CMAKE_CUDA_ARCHITECTURES=$arch" -C cmake.define.JAX_EP_CUDA=ON \
    --target "$site" .
  timeout 60 nvcc -O3 -std=c++17 -arch="sm_$arch" ffi/tests/p2p_link.cu -o build/p2p_link
  PYTHONPATH=$PWD/$site PYTHONUNBUFFERED=1 timeout $((seconds + 30)) \
    python3 benchmarks --platform gpu --out "$logs" --seconds-total "$seconds" "$@"
} 2>&1 | tee "$logs/gpu_bench.txt"
