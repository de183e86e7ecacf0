#!/usr/bin/env bash
# Builds the package on a machine with GPUs and runs the tests of transport p2p.
#
# Usage: tools/gpu_test.sh LOG_FOLDER [CUDA_ARCHITECTURE [PART...]]
#   default: 90, all but network and soak
#
#   build       only builds
#   quantize    the formats' arithmetic on the device, compared with the host's and the definitions
#   silu        fused_silu, compared with the host and the oracle; its speed
#   matmul      grouped matmuls, compared with a plain kernel and with the oracle
#   suite       the test suite, in one process with all GPUs
#   forms       what users may vary: axes, inputs, sizes of calls and rows, routings used again
#   nodes       p2p inside nodes of this machine's GPUs, XLA's collectives between them
#   nvshmem     transport nvshmem, with processes of this machine as nodes
#   hosts       nodes on several hosts, which are this machine: NVSHMEM through UCX, XLA's collectives
#               through sockets
#   network     bytes and times between such nodes where UCX's rate is limited
#   graphs      parts of the suite with all calls in CUDA graphs, and with none; programs that
#               another process compiled
#   xla         transport xla on the GPUs, compared bitwise with the oracle
#   kernels     the kernels without JAX, with ranks in one process and in several
#   processes   the suite, and ranks that fail, in several processes that share a GPU
#   gpus        the same with one process per GPU, one per two GPUs, and two or four per GPU on two
#               GPUs
#   files       the suite's files in jobs of four and of eight processes that share all GPUs
#   examples    the examples and the demo
#   doctor      `python -m jax_ep doctor`
#   wheel       the smoke test of the wheel that GPU_WHEEL names
#   soak        random cases of the kernels and of the package, and replays of captured graphs, as
#               many as SOAK_* say
#
# Environment variables:
#   CUDA_VISIBLE_DEVICES  the GPUs to use; default: all
#   GPU_SITE              a folder in which the package is installed; default: it is built
#   GPU_BIN               a folder with the C++ test programs; default: they are built
#   GPU_WHEEL             a wheel that `make wheels` built, for python3; default: part wheel does not
#                         run
#   JAX_EP_TEST_UCX       the folder of UCX's libraries, such as libucx/lib of the wheel libucx-cu13;
#                         default: part hosts tests XLA's collectives only, network nothing
#   SOAK_CASES            random cases of the kernels, for each number of ranks; default: 10000
#   SOAK_RANKS            the numbers of ranks; default: "2 4 8"
#   SOAK_WORKERS          processes that share these cases; default: half as many as CPUs
#   SOAK_REPLAYS          replays of captured graphs, with 4 ranks; default: 1000000
#   SOAK_JAX_CASES        random cases through JAX; default: 500
#   SOAK_SECONDS          time limit of each number of ranks, and of the replays; default: 400
#   SOAK_SEED             the first seed of all cases; default: 1
#   JAX_EP_CUTLASS_INCLUDE_DIR
#     the folder that contains cutlass/cutlass.h; default: that of nvidia-cutlass in python3
#
# Several runs may share a machine, each with its own GPUs and LOG_FOLDER, after one of them builds:
#
#   tools/gpu_test.sh logs 90 build
#   export GPU_SITE=build/gpu-site GPU_BIN=build/gpu-bin
#   CUDA_VISIBLE_DEVICES=0,1 tools/gpu_test.sh logs/two 90 suite gpus &
#   CUDA_VISIBLE_DEVICES=2 tools/gpu_test.sh logs/one 90 kernels processes &
#   wait
#
# Needs nvcc, cmake, and a python3 with jax for CUDA, pytest, scikit-build-core and nanobind; also
# click and rich for `doctor`, and matplotlib, flax and optax for the examples. Downloads nothing.
# Every step has a time limit.
# shellcheck disable=SC2329  # the functions run_* are called by name
set -uo pipefail
cd "$(dirname "$0")/.." || exit
logs=$1 arch=${2:-90} site=${GPU_SITE:-build/gpu-site} bin=${GPU_BIN:-build/gpu-bin}
default_parts=(quantize silu matmul suite forms nodes nvshmem hosts graphs xla kernels processes
  gpus files examples doctor wheel)
parts=("${@:3}")
((${#parts[@]})) || parts=("${default_parts[@]}")
mkdir -p "$logs"
status=0

# step NAME SECONDS COMMAND...: runs the command and prints the end of its log.
step() {
  local name=$1 limit=$2
  shift 2
  echo "== $name"
  timeout --kill-after=10 "$limit" "$@" > "$logs/gpu_$name.txt" 2>&1
  local result=$?
  tail -n "${lines:-12}" "$logs/gpu_$name.txt"
  ((result == 0)) || { echo "== $name: exit status $result" && status=1; }
  return "$result"
}

run_tests() {
  step "$1" "$2" python3 -m pytest -p no:cacheprovider --gpu --transports p2p "${@:3}"
}

# The GPUs to use, one per line.
visible_gpus() {
  if [[ -n ${CUDA_VISIBLE_DEVICES+given} ]]; then
    tr ',' '\n' <<< "$CUDA_VISIBLE_DEVICES" | sed '/^$/d'
  else
    timeout 60 nvidia-smi --query-gpu=index --format=csv,noheader
  fi
}

show_machine() {
  timeout 60 nvidia-smi --query-gpu=name,driver_version --format=csv,noheader \
    ${CUDA_VISIBLE_DEVICES:+--id="$CUDA_VISIBLE_DEVICES"}
  timeout 60 python3 -c 'import jax, sys; print("jax", jax.__version__, "python", sys.version.split()[0])'
}

build_package() {
  [[ -n ${GPU_SITE:-} ]] && return
  step build_package 300 python3 -m pip install --quiet --no-build-isolation --no-deps --upgrade \
    --config-settings "cmake.define.CMAKE_CUDA_ARCHITECTURES=$arch" \
    --config-settings cmake.define.JAX_EP_CUDA=ON \
    --config-settings cmake.define.JAX_EP_TESTING=ON \
    --target "$site" .
}

# Builds the C++ test programs, once.
build_programs() {
  [[ -n ${GPU_BIN:-} || -n ${programs_built:-} ]] && return
  local programs=(p2p_test peer_memory_test quantize_test silu_test matmul_load_test matmul_test)
  [[ $arch != 90* ]] || programs+=(fp8_gradient_test)
  step configure_programs 60 cmake -S . -B "$bin" -DCMAKE_BUILD_TYPE=Release -DJAX_EP_CUDA=ON \
    "-DCMAKE_CUDA_ARCHITECTURES=$arch" \
    "-DPython_EXECUTABLE=$(python3 -c 'import sys; print(sys.executable)')" &&
    step build_programs 300 cmake --build "$bin" --parallel 8 --target "${programs[@]}" &&
    programs_built=1
}

run_build() {
  build_programs
}

run_quantize() {
  build_programs && step quantize 60 "$bin/quantize_test"
}

run_silu() {
  build_programs && lines=90 step silu 120 "$bin/silu_test"
  run_tests test_fused_silu 120 tests/layer/test_fused_silu.py
}

run_matmul() {
  build_programs && step matmul_load 30 "$bin/matmul_load_test" &&
    lines=30 step matmul 120 "$bin/matmul_test" 20
  [[ $arch != 90* ]] || step fp8_gradient 120 "$bin/fp8_gradient_test" 20
  run_tests test_matmul 300 tests/layer/test_grouped_matmul.py \
    tests/layer/test_grouped_matmul_gradient.py tests/layer/test_quantized_matmul.py \
    tests/layer/test_expert_mlp.py tests/layer/test_gated_matmul.py \
    tests/layer/test_gated_scaled_matmul.py tests/layer/test_quantize_rows.py \
    tests/layer/test_fp8_gradients.py tests/layer/test_matmul_loading.py
}

run_suite() {
  run_tests test_dispatch_combine_graphs 150 tests/exchange/test_dispatch_combine.py \
    tests/exchange/test_graphs.py
  run_tests test_grad 120 tests/exchange/test_grad.py
  run_tests test_transforms_independent_async_overlap 120 tests/exchange/test_transforms.py \
    tests/exchange/test_independent_calls.py tests/exchange/test_async.py \
    tests/exchange/test_overlap.py
  run_tests test_shared_expert_sums 180 tests/layer/test_shared_expert.py \
    tests/exchange/test_sums.py
  run_tests test_changed_results 90 tests/exchange/test_changed_results.py
  run_tests test_router_precision 90 tests/layer/test_router_precision.py
  run_tests test_quantized_errors 150 tests/formats/test_quantized.py \
    tests/formats/test_quantized_grad.py tests/formats/test_quantized_transforms.py \
    tests/exchange/test_errors.py tests/formats/test_format_table.py
}

run_forms() {
  run_tests forms_of_inputs 200 tests/exchange/test_input_forms.py tests/exchange/test_axes.py \
    tests/exchange/test_rows.py tests/exchange/test_unused_rows.py tests/exchange/test_choices.py \
    tests/exchange/test_several_maps.py
  run_tests sizes_of_calls 200 tests/exchange/test_call_sizes.py \
    tests/exchange/test_row_alignment.py tests/exchange/test_redispatch.py \
    tests/formats/test_quantized_tokens.py
}

run_nodes() {
  run_tests test_nodes 300 tests/nodes/test_nodes.py
}

run_nvshmem() {
  step test_nvshmem 700 python3 -m pytest -p no:cacheprovider --gpu tests/nodes/test_nvshmem.py \
    --durations=10
}

run_hosts() {
  local tests=(python3 -m pytest -p no:cacheprovider --gpu tests/nodes/test_hosts.py --verbose
    --durations=15)
  lines=40 step hosts_nvshmem 500 "${tests[@]}" -k nvshmem
  lines=40 step hosts_xla 400 "${tests[@]}" -k "not nvshmem"
}

run_network() {
  lines=90 step network 200 python3 -m pytest -p no:cacheprovider --gpu -m slow -rP \
    tests/nodes/test_hosts.py -k limited
}

run_graphs() {
  local calls=(tests/exchange/test_transforms.py tests/exchange/test_independent_calls.py)
  XLA_FLAGS=--xla_gpu_graph_min_graph_size=1 \
    run_tests graphs_of_all 120 tests/exchange/test_graphs.py "${calls[@]}"
  XLA_FLAGS=--xla_gpu_enable_command_buffer= run_tests graphs_of_none 120 "${calls[@]}"
  run_tests test_fresh_process 200 tests/exchange/test_fresh_process.py
}

run_xla() {
  run_tests transport_xla 300 --transports xla tests/exchange/test_dispatch_combine.py \
    tests/formats/test_quantized.py tests/exchange/test_sums.py
}

run_kernels() {
  local program=$bin/p2p_test gpus=$1
  build_programs || return
  lines=30
  step kernels_peer_memory 20 "$bin/peer_memory_test"
  step kernels_fail 60 "$program" fail 4 "$gpus"
  # Blocks that share a GPU have several messages each.
  step kernels_fail_8 60 "$program" fail 8 "$gpus"
  step kernels_tampered 300 "$program" tampered 4 "$gpus"
  step kernels_changing 300 "$program" changing 4 "$gpus"
  step kernels_cases 120 "$program" cases 4 "$gpus" 20
  step kernels_formats 120 "$program" formats 4 "$gpus" 60
  step kernels_2_processes_on_one_gpu 120 "$program" processes 2 1 2 10
  step kernels_4_processes_on_one_gpu 120 "$program" processes 4 1 4 10
  step kernels_8_ranks_in_2_processes 120 "$program" processes 8 "$gpus" 2 10
  ((gpus >= 4)) && step kernels_4_processes_on_4_gpus 120 "$program" processes 4 4 4 20
  ((gpus >= 4)) && step kernels_2_processes_on_4_gpus 120 "$program" processes 4 4 2 20
  unset lines
}

run_processes() {
  run_tests processes_on_one_gpu 500 tests/processes/test_p2p_processes.py --verbose \
    --durations=10 -k "share_a_gpu or span_processes"
}

run_gpus() {
  run_tests processes_on_all_gpus 500 tests/processes/test_p2p_processes.py --verbose \
    --durations=10 -k "not share_a_gpu and not span_processes and not files"
}

run_files() {
  lines=300 run_tests files_on_shared_gpus 800 tests/processes/test_p2p_processes.py -raP -k files
}

run_examples() {
  run_tests examples 400 tests/tools/test_examples.py --durations=10
}

run_doctor() {
  lines=60 step doctor 60 python3 -m jax_ep doctor
}

run_wheel() {
  local folder=build/gpu-wheel
  if [[ -z ${GPU_WHEEL:-} ]]; then
    echo "== wheel: not run, GPU_WHEEL names none"
    return
  fi
  rm -rf "$folder"
  step wheel_install 120 python3 -m pip install --quiet --no-index --no-deps --target "$folder" \
    "$GPU_WHEEL" &&
    PYTHONPATH=$folder step wheel 120 python3 -P tools/smoke_test.py --transport p2p
}

# run_soak GPUS: a count of 0 leaves out what it counts.
run_soak() {
  local gpus=$1 seconds=${SOAK_SECONDS:-400} n_ranks
  local n_cases=${SOAK_CASES:-10000} replays=${SOAK_REPLAYS:-1000000} jax=${SOAK_JAX_CASES:-500}
  build_programs || return
  for n_ranks in ${SOAK_RANKS:-2 4 8}; do
    ((n_cases == 0)) || soak_kernels "$n_ranks" "$gpus" "$n_cases" "$seconds"
  done
  if ((replays > 0)); then
    lines=3 step soak_replays $((seconds + 60)) "$bin/p2p_test" replay 4 "$gpus" "$replays" \
      "$seconds"
    soak_count "replays, R=4" "$replays" "$logs/gpu_soak_replays.txt"
  fi
  ((jax == 0)) || soak_jax "$gpus" "$jax"
}

# soak_kernels RANKS GPUS CASES SECONDS: splits the cases among workers.
soak_kernels() {
  local n_ranks=$1 gpus=$2 n_cases=$3 seconds=$4 n_failed=0 first last i pids=() files=()
  local workers=${SOAK_WORKERS:-$((($(nproc) + 1) / 2))}
  echo "== soak: $n_cases cases with $n_ranks ranks, $workers workers"
  for ((i = 0; i < workers; ++i)); do
    first=$((n_cases * i / workers)) last=$((n_cases * (i + 1) / workers))
    files+=("$logs/gpu_soak_cases_${n_ranks}_$i.txt")
    timeout --kill-after=10 $((seconds + 60)) "$bin/p2p_test" cases "$n_ranks" "$gpus" \
      $((last - first)) $((${SOAK_SEED:-1} + first)) "$seconds" > "${files[i]}" 2>&1 &
    pids+=($!)
  done
  for ((i = 0; i < workers; ++i)); do
    wait "${pids[i]}" && continue
    n_failed=$((n_failed + 1))
    tail -n "${lines:-12}" "${files[i]}"
  done
  ((n_failed == 0)) || { echo "== soak: $n_failed of $workers workers failed" && status=1; }
  soak_count "cases, R=$n_ranks" "$n_cases" "${files[@]}"
}

# soak_count WHAT N LOG...: adds up what the logs of p2p_test say last; fails unless that is all.
soak_count() {
  local what=$1 wanted=$2 file sums n_run n_errors
  shift 2
  sums=$(for file in "$@"; do
    sed -nE 's/^.*: ([0-9]+) of [0-9]+, ([0-9]+) errors, [0-9.]+ s$/\1 \2/p' "$file" | tail -n 1
  done | awk '{ n += $1; errors += $2 } END { print n + 0, errors + 0 }')
  read -r n_run n_errors <<< "$sums"
  echo "== soak: $what: $n_run of $wanted, $n_errors errors"
  ((n_run >= wanted && n_errors == 0)) || status=1
}

# soak_jax GPUS CASES: in one process, or on a single GPU in 2, 4 and 8 that share it.
soak_jax() {
  local n_cases=$2 options=(tests/exchange/test_random_cases.py)
  if (($1 == 1)); then
    options=(tests/processes/test_p2p_processes.py -m slow -k random -raP)
    n_cases=$((($2 + 2) / 3))
  fi
  run_tests soak_jax 920 "${options[@]}" "--random-cases=$n_cases" \
    "--random-seed=${SOAK_SEED:-1}" &&
    echo "== soak: cases through JAX: $2 of $2, 0 errors"
}

for part in "${parts[@]}"; do
  [[ $(type -t "run_$part") == function ]] || {
    echo "gpu_test: no part $part; there are build ${default_parts[*]} network soak" >&2
    exit 2
  }
done
show_machine 2>&1 | tee "$logs/gpu_setup.txt"
build_package || exit 1
PYTHONPATH=$(realpath "$site") || exit
export PYTHONPATH PYTHONSAFEPATH=1
n_gpus=$(visible_gpus | wc -l)
n_gpus=$((n_gpus >= 4 ? 4 : n_gpus >= 2 ? 2 : 1))
for part in "${parts[@]}"; do
  "run_$part" "$n_gpus"
done

exit $status
