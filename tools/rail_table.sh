#!/usr/bin/env bash
# Prints the tables of docs/scale.md, by the planning code itself: the memory of transport `nvshmem`
# (ffi/core/rail_exchange.h); memory, traffic and modeled times of the planned exchange between many
# nodes (ffi/core/rail.h). Needs no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

cmake -S . -B build/cpp -DJAX_EP_CUDA=OFF > /dev/null
cmake --build build/cpp --target rail_table > /dev/null
build/cpp/rail_table
