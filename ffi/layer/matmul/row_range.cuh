// The rows of a group, and zeros where no kernel writes the result.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "layer/matmul/matmul_call.h"

namespace jax_ep::matmul {

// The rows of a group, clamped to the C rows for any offsets.
struct RowRange {
  int64_t first, size;

  template <class Call>
  __device__ static RowRange Of(const Call& call, int64_t group) {
    const int64_t first = min(int64_t{call.row_offsets[group]}, call.n_rows);
    const int64_t end = min(int64_t{call.row_offsets[group + 1]}, call.n_rows);
    return {first, max(end - first, int64_t{0})};
  }
};

// Zeroes `n_bytes`, a multiple of 16, with all threads of the grid.
__device__ inline void Zero(void* begin, int64_t n_bytes) {
  auto* const vectors = static_cast<uint4*>(begin);
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n_bytes / 16; i += step) {
    vectors[i] = uint4{};
  }
}

// Zeroes the matrices of groups without rows in the form kRows, unless the call adds to them, and,
// if the call asks for it, the rows that are not in use in the other forms. With all threads of the
// grid.
__device__ inline void ZeroUnwritten(const MatmulCall& call) {
  auto* const out = static_cast<char*>(call.out);
  const int64_t row_bytes = call.n * ElementBytes(call.out_type);
  if (call.form == MatmulForm::kRows) {
    if (call.accumulates) return;
    bool sees_empty = false;
    for (int64_t group = threadIdx.x; group < call.n_groups; group += blockDim.x) {
      sees_empty = sees_empty || RowRange::Of(call, group).size == 0;
    }
    if (!__syncthreads_or(sees_empty)) return;
    for (int64_t group = 0; group < call.n_groups; ++group) {
      if (RowRange::Of(call, group).size > 0) continue;
      Zero(out + group * call.k * row_bytes, call.k * row_bytes);
    }
  } else if (call.zeroes_unused) {
    const int64_t first = min(int64_t{call.row_offsets[0]}, call.n_rows);
    const int64_t end = min(int64_t{call.row_offsets[call.n_groups]}, call.n_rows);
    Zero(out, first * row_bytes);
    Zero(out + end * row_bytes, (call.n_rows - end) * row_bytes);
  }
}

// Blocks of 256 threads that fill memory at its full speed, or one if there is nothing to fill.
inline int NumZeroBlocks(const MatmulCall& call, int n_sms) {
  return call.form == MatmulForm::kRows || call.zeroes_unused ? 2 * n_sms : 1;
}

}  // namespace jax_ep::matmul
