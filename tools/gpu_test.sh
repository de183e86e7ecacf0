#!/usr/bin/env bash
# Builds the package on a machine with GPUs and runs the tests of transport p2p.
#
# Usage: tools/gpu_test.sh LOG_FOLDER [CUDA_ARCHITECTURE [PART...]]   default: 90, all parts
#
#   quantize    the formats' arithmetic on the device, compared with the host's
#   silu        fused_silu, compared with the host's and the oracle's; how fast it is
#   suite       the suite, in one process with all GPUs
#   graphs      parts of it with every call in a CUDA graph, and with none; programs that
#               another process made
#   xla         transport xla on the GPUs, compared with the oracle in bits, too
#   bed         the kernels without JAX: ranks in one process and in several
#   processes   the suite, and ranks that fail, in several processes that share a GPU
#   gpus        the same with a process for each GPU, or for two of them, or two or four
#               processes for each of two
#   files       the suite's files in four processes, and in eight, that share the GPUs there are
#   examples    the examples, and the demo
#   doctor      what `python -m jax_ep doctor` and `bench` say
#
# Takes python3 as it is (jax with CUDA, pytest, scikit-build-core, nanobind, cmake, nvcc; click
# and rich for `doctor`, matplotlib, flax and optax for the examples): nothing is downloaded.
# Every step has a limit.
set -uo pipefail
cd "$(dirname "$0")/.."
logs=$1 arch=${2:-90} site=build/gpu-site
parts=("${@:3}")
((${#parts[@]})) || parts=(quantize silu suite graphs xla bed processes gpus files examples doctor)
mkdir -p "$logs"
status=0

# step NAME SECONDS COMMAND...: runs it, and shows the end of its log.
step() {
  local name=$1 limit=$2
  shift 2
  echo "== $name"
  timeout --kill-after=10 "$limit" "$@" > "$logs/gpu_$name.txt" 2>&1
  local result=$?
  tail -n "${lines:-12}" "$logs/gpu_$name.txt"
  ((result == 0)) || { echo "== $name: exit status $result" && status=1; }
}

run_tests() {
  step "$1" "$2" python3 -m pytest -p no:cacheprovider --gpu --transports p2p "${@:3}"
}

setup() {
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  python3 -c 'import jax, sys; print("jax", jax.__version__, "python", sys.version.split()[0])'
  timeout 200 python3 -m pip install --quiet --no-build-isolation --no-deps --upgrade \
    -C "cmake.define.CMAKE_CUDA_ARCHITECTURES=$arch" -C cmake.define.JAX_EP_CUDA=ON \
    --target "$site" .
}

run_quantize() {
  step quantize_build 120 nvcc -std=c++17 -O3 -I ffi -arch="sm_$arch" -Xcompiler -ffp-contract=off \
    ffi/tests/quantize_test.cu ffi/cpu/encode.cc -o build/quantize_test
  step quantize 60 build/quantize_test
}

run_silu() {
  step silu_build 120 nvcc -std=c++17 -O3 -I ffi -arch="sm_$arch" \
    -Xcompiler -ffp-contract=off,-fno-trapping-math ffi/tests/silu_test.cu ffi/cuda/silu.cu \
    ffi/cpu/silu.cc ffi/cpu/encode.cc ffi/cpu/scales.cc ffi/cpu/parallel.cc -o build/silu_test
  lines=90 step silu 120 build/silu_test
  run_tests test_fused_silu 120 tests/test_fused_silu.py
}

run_suite() {
  run_tests test_dispatch_combine_graphs 150 tests/test_dispatch_combine.py tests/test_graphs.py
  run_tests test_grad 120 tests/test_grad.py
  run_tests test_transforms_independence_async_overlap 120 tests/test_transforms.py \
    tests/test_independence.py tests/test_async.py tests/test_overlap.py
  run_tests test_shared_expert 120 tests/test_shared_expert.py
  run_tests test_quantised_errors_cli 150 tests/test_quantised.py tests/test_quantised_grad.py \
    tests/test_quantised_transforms.py tests/test_errors.py \
    tests/test_cli.py::test_bench_shows_times_and_the_rate_of_the_median
}

run_graphs() {
  local calls=(tests/test_transforms.py tests/test_independence.py)
  XLA_FLAGS=--xla_gpu_graph_min_graph_size=1 \
    run_tests graphs_of_all 120 tests/test_graphs.py "${calls[@]}"
  XLA_FLAGS=--xla_gpu_enable_command_buffer= run_tests graphs_of_none 120 "${calls[@]}"
  run_tests test_fresh_process 200 tests/test_fresh_process.py \
    tests/test_config.py::test_p2p_serves_one_node
}

run_xla() {
  run_tests transport_xla 240 --transports xla tests/test_dispatch_combine.py \
    tests/test_quantised.py
}

build_bed() {
  cmake -S . -B build/gpu-bed -DCMAKE_BUILD_TYPE=Release -DJAX_EP_CUDA=ON \
    "-DCMAKE_CUDA_ARCHITECTURES=$arch" &&
    cmake --build build/gpu-bed --parallel 8 \
      --target p2p_test p2p_format_test peer_memory_test
}

run_bed() {
  local bed=build/gpu-bed/p2p_test gpus=$1
  echo "== bed: build"
  timeout 300 bash -c "$(declare -f build_bed); arch=$arch build_bed" > "$logs/gpu_bed.txt" 2>&1 ||
    { tail -n 30 "$logs/gpu_bed.txt" && status=1 && return; }
  lines=30
  step bed_peer_memory 20 build/gpu-bed/peer_memory_test
  step bed_fail 60 "$bed" fail 4 "$gpus"
  step bed_cases 120 "$bed" cases 4 "$gpus" 20
  step bed_formats 120 build/gpu-bed/p2p_format_test 4 "$gpus" 60
  step bed_2_processes_on_one_gpu 120 "$bed" processes 2 1 2 10
  step bed_4_processes_on_one_gpu 120 "$bed" processes 4 1 4 10
  step bed_8_ranks_in_2_processes 120 "$bed" processes 8 "$gpus" 2 10
  ((gpus >= 4)) && step bed_4_processes_on_4_gpus 120 "$bed" processes 4 4 4 20
  ((gpus >= 4)) && step bed_2_processes_on_4_gpus 120 "$bed" processes 4 4 2 20
  unset lines
}

run_processes() {
  run_tests processes_on_one_gpu 500 tests/test_p2p_processes.py --verbose --durations=10 \
    -k "share_a_gpu or span_processes"
}

run_gpus() {
  run_tests processes_on_all_gpus 500 tests/test_p2p_processes.py --verbose --durations=10 \
    -k "not share_a_gpu and not span_processes and not files"
}

run_files() {
  lines=180 run_tests files_on_shared_gpus 500 tests/test_p2p_processes.py -raP -k files
}

run_examples() {
  run_tests examples 400 tests/test_examples.py --durations=10
}

run_doctor() {
  lines=60 step doctor 60 python3 -m jax_ep doctor
  lines=20 step cli_bench 60 python3 -m jax_ep bench --tokens 4096 --hidden 7168 --experts 256
}

setup 2>&1 | tee "$logs/gpu_setup.txt"
export PYTHONPATH=$PWD/$site PYTHONSAFEPATH=1
gpus=$(nvidia-smi --query-gpu=index --format=csv,noheader | wc -l)
gpus=$((gpus >= 4 ? 4 : gpus >= 2 ? 2 : 1))
for part in "${parts[@]}"; do
  "run_$part" "$gpus"
done

exit $status
