#!/usr/bin/env bash
# Trains tiny models with releases of other frameworks, without jax_ep and with it, on CPU devices.
#
# Usage: tools/frameworks.sh VENV [OPTION OF PYTEST ...]
#
# Each framework gets an environment of its own, .venv-frameworks-*, with Python 3.12, the pinned
# versions of tests/frameworks/*.txt, and jax_ep's wheel. pytest runs in VENV.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/find_python.sh
source tools/build_wheel.sh

venv=$1
shift
python=$(find_python 3.12) || {
  echo "error: no Python 3.12 (looked on PATH and in pyenv; PYTHONS= names others)" >&2
  exit 1
}
build_wheel "$python" cp312-abi3
wheel=$(compgen -G "$wheels/*-cp312-abi3-*.whl")
for pins in tests/frameworks/*.txt; do
  name=$(basename "$pins" .txt)
  environment=.venv-frameworks-$name
  if ! cmp -s "$pins" "$environment/pins.txt"; then
    echo "--- installing $name"
    "$python" -m venv --clear "$environment"
    "$environment/bin/pip" install --quiet --no-deps -r "$pins"
    cp "$pins" "$environment/pins.txt"
  fi
  # Reinstalls: the content of the wheel may change while its version stays the same.
  "$environment/bin/pip" install --quiet --no-deps --force-reinstall "$wheel"
done
"$venv/bin/python" -m pytest tests/frameworks "$@"
