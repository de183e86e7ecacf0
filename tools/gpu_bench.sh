#!/usr/bin/env bash
# Builds the package on a machine with GPUs and runs the GPU benchmark.
#
# Usage: tools/gpu_bench.sh LOG_FOLDER [BENCHMARK_OPTION...]
#
# Needs nvcc, and a python3 with jax for CUDA, click, rich, scikit-build-core and nanobind. Downloads
# nothing. Writes the log and, after each measurement, gpu_*.jsonl to LOG_FOLDER.
#
# Environment variables:
#   CUDA_ARCHITECTURE  default: 90
#   BENCH_SECONDS      time limit of the benchmark; default: 400
#   GPU_SITE           a folder in which the package is installed; default: it is built
#   JAX_EP_CUTLASS_INCLUDE_DIR
#     the folder that contains cutlass/cutlass.h; default: that of nvidia-cutlass in python3
set -uo pipefail
cd "$(dirname "$0")/.."
logs=$1 arch=${CUDA_ARCHITECTURE:-90} seconds=${BENCH_SECONDS:-400}
site=${GPU_SITE:-build/gpu-site}
shift
mkdir -p "$logs" build

{
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  [[ -n ${GPU_SITE:-} ]] ||
    timeout 200 python3 -m pip install --quiet --no-build-isolation --no-deps --upgrade \
      --config-settings "cmake.define.CMAKE_CUDA_ARCHITECTURES=$arch" \
      --config-settings cmake.define.JAX_EP_CUDA=ON \
      --target "$site" .
  timeout 60 nvcc -O3 -std=c++17 -arch="sm_$arch" ffi/tests/bench/p2p_link.cu -o build/p2p_link
  PYTHONPATH=$(realpath "$site") PYTHONUNBUFFERED=1 timeout $((seconds + 30)) \
    python3 benchmarks --platform gpu --out "$logs" --limit 90 --seconds-total "$seconds" "$@"
} 2>&1 | tee "$logs/gpu_bench.txt"
