#!/usr/bin/env bash
# Compiles every CUDA source to an object with nvcc, for the architectures in CUDA_ARCHS. Needs no
# GPU. Takes nvcc from CUDACXX, PATH or CUDA_HOME; if there is none, installs the CUDA 13 wheels
# from the package index, which contain a complete nvcc, into build/cuda-venv.
set -euo pipefail
cd "$(dirname "$0")/.."

mapfile -t sources < <(find ffi -name '*.cu' | sort)
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
    "$venv/bin/pip" install --quiet 'nvidia-cuda-nvcc==13.*' 'nvidia-nvvm==13.*' \
      'nvidia-cuda-crt==13.*' 'nvidia-cuda-cccl==13.*' 'nvidia-cuda-runtime==13.*' >&2
  fi
  compgen -G "$PWD/$venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc"
}

nvcc=$(find_nvcc)
flags=(-std=c++17 -O3 -I ffi --expt-relaxed-constexpr -Xcompiler -Wall,-Wextra,-Werror
  -Werror all-warnings)
for arch in ${CUDA_ARCHS:-80 90 100f}; do
  flags+=(-gencode "arch=compute_$arch,code=sm_$arch")
done
mkdir -p build/cuda-compile
for source in "${sources[@]}"; do
  object=build/cuda-compile/$(tr / _ <<< "${source%.cu}").o
  echo "nvcc $source"
  "$nvcc" "${flags[@]}" -c "$source" -o "$object"
done
echo "cuda-compile: ${#sources[@]} sources compiled"
