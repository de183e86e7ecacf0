#!/usr/bin/env bash
# Builds the wheels that users get and runs the fast tests with several versions of JAX.
#
# Usage: tools/matrix.sh [JAX:PYTHON ...]        default: the list below
#
# JAX is a version, such as 0.11.2 or 0.12.*, or `nightly`: last night's build, from JAX's own index.
#
# Environment variables:
#   PYTHONS        interpreters to use, names or paths; default: pythonX.Y on PATH, then those of
#                  pyenv
#   MATRIX_STRICT  1: a missing interpreter is an error, not just a line in the summary
#   MATRIX_TESTS   options for pytest, instead of the default ones
#   JAX_NIGHTLIES  the index of nightly builds; default: JAX's
#
# Two wheels serve all versions: one for Python 3.11, and an abi3 wheel for every later Python. Both
# are built against the oldest supported XLA FFI headers, so they work with every later jaxlib. If
# there is an nvcc, the abi3 wheel contains the CUDA extension, and tools/gpu_programs.sh runs for
# each version of JAX.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/find_python.sh
source tools/build_wheel.sh

matrix=("$@")
if [[ ${#matrix[@]} -eq 0 ]]; then
  matrix=(0.10.2:3.11 0.11.2:3.12 0.12.*:3.13)
fi
# It has nightly builds alone: JAX's other index may offer a release in their place.
nightlies=${JAX_NIGHTLIES:-https://us-python.pkg.dev/ml-oss-artifacts-published/jax-public-nightly-artifacts-registry/simple/}
tests=(-n 2 --dist loadfile --ignore=tests/tools/test_examples.py
  -m "not slow and not multiprocess and not gpu and not multigpu")
if [[ -n ${MATRIX_TESTS:-} ]]; then
  read -ra tests <<< "$MATRIX_TESTS"
fi
summary=()
failed=0
run=0

# install_jax VENV JAX WHEEL: installs them and what the tests need.
install_jax() {
  local pip=$1/bin/pip jax=$2 wheel=$3
  if [[ $jax != nightly ]]; then
    "$pip" install --quiet "${wheel}[test]" "jax==$jax"
    return
  fi
  # Pre-releases of JAX alone, even if there is a newer release; then what these need beyond it.
  "$pip" install --quiet "${wheel}[test]" || return 1
  "$pip" install --quiet --pre --no-deps --force-reinstall --index-url "$nightlies" jax jaxlib || return 1
  "$pip" install --quiet jax jaxlib || return 1
  "$1/bin/python" - << 'END'
import jax, jaxlib
print(f"jax {jax.__version__}, jaxlib {jaxlib.__version__}")
if not ("dev" in jax.__version__ and "dev" in jaxlib.__version__):
    raise SystemExit("matrix: these must be nightly builds (.dev)")
END
}

# run_tests PYTHON X.Y JAX: installs the wheel with that JAX and runs the tests.
run_tests() {
  local python=$1 version=$2 jax=$3 tag=cp312-abi3
  [[ $version == 3.11 ]] && tag=cp311-cp311
  build_wheel "$python" "$tag" || return 1
  local wheel
  wheel=$(compgen -G "$wheels/*-$tag-*.whl") || return 1
  local venv=.venv-matrix/jax-${jax/.\*/}-python-$version
  [[ -x $venv/bin/python ]] || "$python" -m venv "$venv" || return 1
  install_jax "$venv" "$jax" "$wheel" || return 1
  # Reinstalls: the content of the wheel may change while its version stays the same.
  "$venv/bin/pip" install --quiet --no-deps --force-reinstall "$wheel" || return 1
  # PYTHONSAFEPATH: import the installed package, not the sources in this folder.
  PYTHONSAFEPATH=1 "$venv/bin/python" -m pytest "${tests[@]}" || return 1
  if [[ $version != 3.11 ]]; then tools/gpu_programs.sh "$venv" || return 1; fi
}

for entry in "${matrix[@]}"; do
  jax=${entry%%:*} version=${entry##*:}
  echo "=== jax $jax, Python $version"
  if ! python=$(find_python "$version"); then
    echo "not run: no Python $version (looked on PATH and in pyenv; PYTHONS= names others)"
    summary+=("jax $jax, Python $version: NOT RUN, no such interpreter")
    [[ ${MATRIX_STRICT:-0} == 1 ]] && failed=1
    continue
  fi
  run=$((run + 1))
  started=$SECONDS
  if run_tests "$python" "$version" "$jax"; then
    summary+=("jax $jax, Python $version: passed in $((SECONDS - started)) s")
  else
    summary+=("jax $jax, Python $version: FAILED")
    failed=1
  fi
done

echo "=== matrix"
printf '%s\n' "${summary[@]}"
if [[ $run -eq 0 ]]; then
  echo "error: no interpreter was found: nothing ran" >&2
  exit 1
fi
exit "$failed"
