#!/usr/bin/env bash
# Compiles every CUDA source to an object with nvcc, for the architectures in CUDA_ARCHS, two at a
# time. Needs no GPU. Takes nvcc from CUDACXX, PATH or CUDA_HOME; if there is none, installs the CUDA
# toolkit's wheels from the package index into build/cuda-venv. Takes the headers of CUTLASS from
# JAX_EP_CUTLASS_INCLUDE_DIR or .venv, or installs them into build/cutlass.
set -euo pipefail
cd "$(dirname "$0")/.."

# In reverse order, those that take longest come early.
mapfile -t sources < <(find ffi -name '*.cu' | sort -r)
if [[ ${#sources[@]} -eq 0 ]]; then
  echo "cuda-compile: there are no CUDA sources"
  exit 0
fi

find_nvcc() {
  local candidate
  for candidate in "${CUDACXX:-}" nvcc "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc"; do
    if [[ -n $candidate ]] && command -v "$candidate"; then
      return
    fi
  done
  local venv=build/cuda-venv
  if ! compgen -G "$venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc" > /dev/null; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" tools/requirements.py --cuda-toolkit ON > "$venv/requirements.txt"
    "$venv/bin/pip" install --quiet -r "$venv/requirements.txt" >&2
  fi
  compgen -G "$PWD/$venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc"
}

find_cutlass() {
  local headers=cutlass_library/source/include python=${PYTHON:-python3}
  if [[ -n ${JAX_EP_CUTLASS_INCLUDE_DIR:-} ]]; then
    echo "$JAX_EP_CUTLASS_INCLUDE_DIR"
  elif ! compgen -G ".venv/lib/python3*/site-packages/$headers"; then
    if [[ ! -d build/cutlass/$headers ]]; then
      mkdir -p build/cutlass
      "$python" tools/requirements.py --cuda ON > build/cutlass/requirements.txt || return
      "$python" -m pip install --quiet --no-deps --target build/cutlass \
        -r build/cutlass/requirements.txt >&2 || return
    fi
    echo "build/cutlass/$headers"
  fi
}

# compile SOURCE: for the architectures that CMakeLists.txt gives it.
compile() {
  local source=$1 arch archs=$CUDA_ARCHS object started=$SECONDS
  local flags=(-std=c++17 -O3 -DNDEBUG -I ffi -isystem "$cutlass" --expt-relaxed-constexpr
    -Xcompiler -Wall,-Wextra,-Werror -Werror all-warnings)
  case $source in
    */matmul/hopper*)
      [[ " $archs" == *" 90"* ]] || return 0
      archs=90a
      ;;
    */matmul/*) archs=$(tr ' ' '\n' <<< "$archs" | grep -v ^90) || archs=90 ;;
  esac
  for arch in $archs; do
    flags+=(-gencode "arch=compute_$arch,code=sm_$arch")
  done
  object=build/cuda-compile/$(tr / _ <<< "${source%.cu}").o
  "$nvcc" "${flags[@]}" -c "$source" -o "$object"
  echo "nvcc $source: $((SECONDS - started)) s"
}

nvcc=$(find_nvcc)
cutlass=$(find_cutlass)
CUDA_ARCHS=${CUDA_ARCHS:-80 90 100f}
export nvcc cutlass CUDA_ARCHS
export -f compile
mkdir -p build/cuda-compile
printf '%s\n' "${sources[@]}" | xargs -P 2 -I {} bash -euo pipefail -c "compile {}"
echo "cuda-compile: ${#sources[@]} sources compiled in $SECONDS s"
