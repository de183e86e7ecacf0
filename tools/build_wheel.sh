# shellcheck shell=bash
# Sourced by scripts that need the wheels that users get, with what tests call besides, built against
# the oldest supported jaxlib.

wheels=build/matrix/wheels

# build_wheel PYTHON TAG: builds the wheel with that tag, unless it is up to date.
build_wheel() {
  local python=$1 tag=$2 stamp=build/matrix/$2.stamp cuda=${CUDA:-AUTO}
  [[ $tag == cp311-* ]] && cuda=OFF
  if [[ -f $stamp && -z $(find jax_ep ffi CMakeLists.txt pyproject.toml -newer "$stamp" \
    -not -path '*/__pycache__*' -print -quit) ]]; then
    return
  fi
  echo "--- building the $tag wheel"
  rm -f "$wheels"/*-"$tag"-*.whl
  mkdir -p "$wheels"
  touch "$stamp.new"
  "$python" -m venv build/matrix/builder-"$tag" || return 1
  build/matrix/builder-"$tag"/bin/pip wheel --quiet --no-deps --wheel-dir "$wheels" \
    --config-settings build-dir=build/matrix/"$tag" \
    --config-settings cmake.define.JAX_EP_CUDA=$cuda \
    --config-settings cmake.define.JAX_EP_TESTING=ON \
    --config-settings cmake.define.CMAKE_CUDA_ARCHITECTURES=90 . || return 1
  mv "$stamp.new" "$stamp"
}
