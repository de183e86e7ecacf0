// The parameters of the grouped matmul along rows (weight_gradient.cuh).
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "layer/matmul/matmul_call.h"

namespace jax_ep::matmul::weight_gradient {

constexpr uint32_t kGroupRows = 64;    // of a matrix, of a warp group
constexpr uint32_t kLineBytes = 128;   // in shared memory
constexpr uint32_t kLineColumns = 64;  // of a line of 16-bit floats
constexpr uint32_t kDepth = 32;        // of a stage, in terms, which are rows of a group

// A group that has rows.
struct Span {
  uint32_t first_row, n_rows, group, unused;
};

// In the workspace.
struct Table {
  Span* spans;  // the largest first
  uint2* rows;  // of each group, in their order: the first, and how many; see FillTable
  uint32_t* n_spans;
  uint32_t* n_taken;  // tiles, of all groups

  static Table In(const MatmulCall& call) {
    constexpr size_t kAlignment = 128;
    auto* const words = static_cast<uint32_t*>(call.workspace);
    auto* const spans = reinterpret_cast<Span*>(static_cast<char*>(call.workspace) + kAlignment);
    return {spans, reinterpret_cast<uint2*>(spans + call.n_groups), words, words + 1};
  }
};

struct Params {
  CUtensorMap lhs, rhs;  // boxes of kDepth lines
  CUtensorMap out;       // boxes of kGroupRows lines
  Table table;
  uint32_t n_rows, n_columns;  // of a matrix
};

// Of a call in the form kRows.
cudaError_t MakeParams(const MatmulCall& call, Params& params);

}  // namespace jax_ep::matmul::weight_gradient
