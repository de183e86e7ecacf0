#!/usr/bin/env bash
# Two rules of layering that no linter knows. Prints each line that breaks one.
set -euo pipefail
cd "$(dirname "$0")/.."
status=0

# rule TEXT GREP-OPTION... : fails if grep finds something.
rule() {
  local text=$1
  shift
  if grep -rnE --exclude-dir=__pycache__ "$@"; then
    echo "error: $text" >&2
    status=1
  fi
}

python_dirs=()
for dir in jax_ep tests examples benchmarks; do
  [[ -d $dir ]] && python_dirs+=("$dir")
done

rule "jax._src is private: use it in jax_ep/_jax_compat.py only" \
  --include='*.py' --exclude=_jax_compat.py \
  -e 'jax\._src' -e 'from jax import .*\b_src\b' "${python_dirs[@]}"

framework='#[[:space:]]*include[[:space:]]*[<"](xla/|nanobind/|Python\.h)'
rule "CUDA sources include no XLA, nanobind or Python header" \
  --include='*.cu' --include='*.cuh' -e "$framework" ffi
if [[ -d ffi/core ]]; then
  rule "ffi/core includes no XLA, nanobind or Python header" -e "$framework" ffi/core
fi
exit "$status"
