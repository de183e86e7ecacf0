#!/usr/bin/env bash
# Pins what workflows and `make docs` install, with hashes, in tools/locks.
#
# Usage: tools/lock.sh [UV_OPTION...]        --upgrade: to the newest versions that pyproject.toml allows
#
# Needs uv. The locks serve all platforms and Python 3.11 and later.
set -euo pipefail
cd "$(dirname "$0")/.."

# lock NAME SOURCE...: the requirements of the sources.
options=("$@")
lock() {
  uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
    --custom-compile-command tools/lock.sh "${options[@]}" --output-file "tools/locks/$1.txt" "${@:2}"
}

mkdir -p tools/locks
lock docs --group docs
lock release --group release
lock smoke pyproject.toml --extra cli --group smoke
# What the package is built with, also with the CUDA kernels. scikit-build-core adds ninja.
python3 -c '
import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], "ninja", sep="\n")
' | lock build - --group cuda-build --group cuda-toolkit --group nvshmem-cu13
