#!/usr/bin/env bash
# Runs the tests of the host transport under AddressSanitizer + UndefinedBehaviorSanitizer,
# then under ThreadSanitizer.
#
# Usage: tests/sanitizers/run.sh VENV [PYTEST-OPTION...]
#
# VENV has the dependencies and the build tools; the instrumented package goes to
# build/sanitize/. Python and jaxlib are not instrumented, so their own faults are not found.
# For each sanitizer, in this order:
#
#   1. build the package, seeded_faults.cc and (for TSan) tsan_edges.cc;
#   2. check that the sanitizer reports each seeded fault, and nothing where there is none;
#   3. run the C++ tests of ffi/tests;
#   4. run pytest;
#   5. run the fault scripts of tests/faults, a sample of each.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=$(realpath "$1")
shift
# Tests that start other processes are left out: those would run without the instrumented package.
pytest_options=(-k "host and not fresh_process and not test_cpp"
  -m "not multiprocess and not slow and not gpu and not multigpu")
# Whole layers make the same calls, but with sanitizers their programs take minutes to compile.
for file in tests/*/test_{drops,integrations,moe,nnx*,placement,split,transformer_engine*}.py; do
  pytest_options+=("--ignore=$file")
done
pytest_options+=("$@")
here=tests/sanitizers
export CXX=${CXX:-g++}
site_packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
include=$site_packages/jaxlib/include

fail() {
  echo "sanitize: $*" >&2
  exit 1
}

# build SANITIZER DIRECTORY: the package goes to DIRECTORY/package.
build() {
  local sanitizer=$1 dir=$2 flags
  echo "--- $sanitizer: building"
  mkdir -p "$dir"
  rm -rf "$dir/package"
  CXXFLAGS=-D_GLIBCXX_ASSERTIONS "$venv/bin/pip" install --quiet --no-deps --no-build-isolation \
    --target "$dir/package" \
    --config-settings build-dir="$dir/cmake" \
    --config-settings cmake.build-type=Debug \
    --config-settings install.strip=false \
    --config-settings cmake.define.JAX_EP_SANITIZE="$sanitizer" \
    --config-settings cmake.define.JAX_EP_TESTING=ON \
    --config-settings cmake.define.JAX_EP_CUDA=OFF .
  flags=(-std=c++17 -g -O1 -fPIC -shared -Wall -Wextra -isystem "$include")
  "$CXX" "${flags[@]}" -fsanitize="$sanitizer" -fno-sanitize-recover=all \
    -fno-omit-frame-pointer $here/seeded_faults.cc -o "$dir/seeded_faults.so"
  if [[ $sanitizer == thread ]]; then
    "$CXX" "${flags[@]}" $here/tsan_edges.cc -o "$dir/tsan_edges.so"
  fi
  # Without instrumentation, everything below would pass.
  local extension symbol=__asan_init
  [[ $sanitizer == thread ]] && symbol=__tsan_init
  for extension in "$dir"/package/jax_ep/*.so; do
    [[ $(nm -D --undefined-only "$extension") == *" $symbol"* ]] ||
      fail "$extension is not instrumented: CMakeLists.txt must apply JAX_EP_SANITIZE"
  done
}

# python SANITIZER DIRECTORY ARGUMENT...: runs Python with the sanitizer's runtime library.
# -S and -P keep an editable install and this folder from shadowing the instrumented package.
python() {
  local sanitizer=$1 dir=$2
  shift 2
  local path=$dir/package:$here:tests/faults:$site_packages
  if [[ $sanitizer == thread ]]; then
    # When jaxlib waits, TSan sees the lock at the end of the wait but not the unlock at its
    # start, so its graph of held locks overflows. The C++ tests check the order of jax_ep's locks.
    local options="exitcode=${tsan_exitcode:-66} detect_deadlocks=0 history_size=4"
    env LD_PRELOAD="$("$CXX" -print-file-name=libtsan.so)" PYTHONPATH="$path" \
      TSAN_OPTIONS="$options suppressions=$PWD/$here/tsan.supp log_path=$dir/report" \
      JAX_EP_TSAN_EDGES="$dir/tsan_edges.so" "$venv/bin/python" -S -P "$@"
  else
    local preload
    preload="$("$CXX" -print-file-name=libasan.so) $("$CXX" -print-file-name=libubsan.so)"
    # The C++ tests look for leaks; here, every report would be about Python.
    env LD_PRELOAD="$preload" PYTHONPATH="$path" \
      ASAN_OPTIONS="detect_leaks=0 log_path=$dir/report" \
      UBSAN_OPTIONS="print_stacktrace=1 log_path=$dir/report" "$venv/bin/python" -S -P "$@"
  fi
}

# seeded SANITIZER DIRECTORY FAULT [TEXT]: checks that the report contains TEXT or, without TEXT,
# that there is no report.
seeded() {
  local sanitizer=$1 dir=$2 fault=$3 text=${4:-} status=0
  rm -f "$dir"/report.*
  python "$sanitizer" "$dir" $here/seeded_faults.py "$dir/seeded_faults.so" "$fault" \
    > "$dir/seeded.log" 2>&1 || status=$?
  cat "$dir"/report.* >> "$dir/seeded.log" 2> /dev/null || true
  local as_expected=1
  if [[ -z $text ]]; then
    [[ $status -eq 0 ]] || as_expected=0
  elif [[ $status -eq 0 ]] || ! grep -q "$text" "$dir/seeded.log"; then
    as_expected=0
  fi
  if [[ $as_expected -eq 0 ]]; then
    cat "$dir/seeded.log"
    fail "seeded fault '$fault': expected '${text:-no report}', got exit status $status"
  fi
  echo "seeded fault '$fault': ${text:-no report}, as expected"
}

# run SANITIZER DIRECTORY: runs all steps for one sanitizer.
run() {
  local sanitizer=$1 dir=$2 status=0
  build "$sanitizer" "$dir"
  echo "--- $sanitizer: seeded faults"
  seeded "$sanitizer" "$dir" none
  if [[ $sanitizer == thread ]]; then
    seeded "$sanitizer" "$dir" race 'data race.*in Commit'
    seeded "$sanitizer" "$dir" copy-race 'data race.*in Commit'
  else
    seeded "$sanitizer" "$dir" overflow 'heap-buffer-overflow.*in Commit'
    seeded "$sanitizer" "$dir" signed-overflow 'signed integer overflow'
  fi
  if compgen -G 'ffi/tests/unit/*.cc' > /dev/null; then
    echo "--- $sanitizer: C++ tests"
    {
      "$venv/bin/cmake" -S . -B "$dir/cpp" -G Ninja -DCMAKE_MAKE_PROGRAM="$venv/bin/ninja" \
        -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS=-D_GLIBCXX_ASSERTIONS \
        -DJAX_EP_SANITIZE="$sanitizer" -DJAX_EP_CUDA=OFF &&
        "$venv/bin/cmake" --build "$dir/cpp"
    } > "$dir/cpp.log" 2>&1 || { cat "$dir/cpp.log"; fail "the C++ tests do not build"; }
    "$venv/bin/ctest" --test-dir "$dir/cpp" --output-on-failure --no-tests=error
  fi
  local plugin=()
  [[ $sanitizer == thread ]] && plugin=(-p tsan_edges)
  reported "$sanitizer" "$dir" pytest -m pytest "${plugin[@]}" -p no:cacheprovider \
    "${pytest_options[@]}"
  reported "$sanitizer" "$dir" faults tests/faults/__main__.py --quick
}

# reported SANITIZER DIRECTORY WHAT ARGUMENT...: runs Python; there must be no report.
reported() {
  local sanitizer=$1 dir=$2 what=$3 status=0
  shift 3
  echo "--- $sanitizer: $what"
  rm -f "$dir"/report.*
  # Exit with Python's status: some of TSan's reports do not concern our code.
  tsan_exitcode=0 python "$sanitizer" "$dir" "$@" || status=$?
  if compgen -G "$dir/report.*" > /dev/null; then
    if [[ $sanitizer == thread ]]; then
      "$venv/bin/python" $here/our_reports.py "$dir"/report.* || fail "$sanitizer: reports above"
    else
      cat "$dir"/report.*
      fail "$sanitizer: reports above"
    fi
  fi
  [[ $status -eq 0 ]] || fail "$sanitizer: $what ended with status $status"
}

[[ -d $include/xla/ffi/api ]] || fail "no XLA FFI headers in $include"
for sanitizer in ${SANITIZERS:-address,undefined thread}; do
  run "$sanitizer" "$PWD/build/sanitize/${sanitizer/,/-}"
done
echo "sanitize: no reports"
