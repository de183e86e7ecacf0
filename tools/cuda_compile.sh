#!/usr/bin/env bash
# Compiles the CUDA sources in some folders to objects with nvcc, for the architectures in CUDA_ARCHS,
# two at a time.
#
# Usage: tools/cuda_compile.sh [FOLDER...]        default: ffi
#
# Needs no GPU. Takes nvcc from CUDACXX, PATH or CUDA_HOME; if there is none, installs the CUDA
# toolkit's wheels from the package index into build/cuda-venv. Takes the headers of CUTLASS and of
# NVSHMEM from JAX_EP_CUTLASS_INCLUDE_DIR and JAX_EP_NVSHMEM_DIR, or .venv, or installs them into
# build/cuda-headers.
set -euo pipefail
cd "$(dirname "$0")/.."

# In reverse order, those that take longest come early.
mapfile -t sources < <(find "${@:-ffi}" -name '*.cu' | sort -r)
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

# find_headers GIVEN FOLDER: prints GIVEN or, if that is empty, FOLDER where it is installed.
find_headers() {
  local folder=$2 python=${PYTHON:-python3} target=build/cuda-headers
  if [[ -n $1 ]]; then
    echo "$1"
  elif ! compgen -G ".venv/lib/python3*/site-packages/$folder"; then
    if [[ ! -d $target/$folder ]]; then
      mkdir -p $target
      "$python" tools/requirements.py --cuda ON > $target/requirements.txt || return
      "$python" -m pip install --quiet --no-deps --target $target \
        -r $target/requirements.txt >&2 || return
    fi
    echo "$target/$folder"
  fi
}

# compile SOURCE: for the architectures that CMakeLists.txt gives it.
compile() {
  local source=$1 arch archs=$CUDA_ARCHS object started=$SECONDS
  local flags=(-std=c++17 -O3 -DNDEBUG -I ffi -isystem "$cutlass" --expt-relaxed-constexpr
    -Xcompiler -Wall,-Wextra,-Werror -Werror all-warnings)
  case $source in
    */matmul/hopper* | */weight_gradient*.cu | */matmul_probe_baseline.cu)
      [[ " $archs" == *" 90"* ]] || return 0
      archs=90a
      ;;
    */nvshmem/*) flags+=(-rdc=true -isystem "$nvshmem/include") ;;
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
cutlass=$(find_headers "${JAX_EP_CUTLASS_INCLUDE_DIR:-}" cutlass_library/source/include)
nvshmem=$(find_headers "${JAX_EP_NVSHMEM_DIR:-}" nvidia/nvshmem)
CUDA_ARCHS=${CUDA_ARCHS:-80 90 100f}
export nvcc cutlass nvshmem CUDA_ARCHS
export -f compile
mkdir -p build/cuda-compile
printf '%s\n' "${sources[@]}" | xargs -P 2 -I {} bash -euo pipefail -c "compile {}"
echo "cuda-compile: ${#sources[@]} sources compiled in $SECONDS s"
