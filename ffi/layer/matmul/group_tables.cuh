// The tables that CUTLASS's kernels read, and the kernel that fills them from the row offsets.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/device/ptx.cuh"
#include "layer/matmul/cutlass_kernels.cuh"
#include "layer/matmul/matmul_call.h"
#include "layer/matmul/row_range.cuh"

namespace jax_ep::matmul::hopper {

// How many rows the groups have, on average: which schedule is the fastest.
enum class RowCount : uint32_t { kFew, kSome, kMany };

// An entry per group in each table.
template <class Kernel>
struct GroupTables {
  using LhsStride = typename Kernel::InternalStrideA;
  using RhsStride = typename Kernel::InternalStrideB;
  using OutStride = typename Kernel::InternalStrideD;

  typename ProblemShape::UnderlyingProblemShape* shapes;
  const typename Kernel::ElementA** lhs;
  const typename Kernel::ElementB** rhs;
  typename Kernel::ElementD** out;
  LhsStride* lhs_strides;
  RhsStride* rhs_strides;
  OutStride* out_strides;
  // Of e4m3.
  const float** lhs_scales;
  const float** rhs_scales;
  LhsScales* lhs_scales_layouts;
  RowCount* row_count;  // one word
};

// The stride that is not 1: elements from one row to the next, or from one column to the next.
template <class Stride>
__device__ void SetStride(Stride& stride, int64_t elements) {
  if constexpr (cute::is_static<std::decay_t<decltype(cute::get<0>(stride))>>::value) {
    cute::get<1>(stride) = elements;
  } else {
    cute::get<0>(stride) = elements;
  }
}

template <MatmulForm kForm, class Kernel>
__device__ void FillEntry(const MatmulCall& call, const GroupTables<Kernel>& tables, int64_t group,
                          const RowRange& rows) {
  const int m = static_cast<int>(rows.size);
  const int k = static_cast<int>(call.k), n = static_cast<int>(call.n);
  const auto* const lhs = static_cast<const typename Kernel::ElementA*>(call.lhs);
  const auto* const rhs = static_cast<const typename Kernel::ElementB*>(call.rhs);
  auto* const out = static_cast<typename Kernel::ElementD*>(call.out);
  tables.lhs[group] = lhs + rows.first * call.k;
  SetStride(tables.lhs_strides[group], call.k);
  SetStride(tables.out_strides[group], call.n);
  if constexpr (kForm == MatmulForm::kRows) {
    // CUTLASS multiplies along an empty axis what it finds in its registers.
    tables.shapes[group] = cute::make_shape(m > 0 ? k : 0, n, m);
    tables.rhs[group] = rhs + rows.first * call.n;
    SetStride(tables.rhs_strides[group], call.n);
    tables.out[group] = out + group * call.k * call.n;
  } else {
    tables.shapes[group] = cute::make_shape(m, n, k);
    tables.rhs[group] = rhs + group * call.k * call.n;
    SetStride(tables.rhs_strides[group], kForm == MatmulForm::kWeights ? call.n : call.k);
    tables.out[group] = out + rows.first * call.n;
  }
  if (call.lhs_scales != nullptr) {
    const int64_t k_blocks = call.k / kMatmulScaleBlock;
    const int64_t n_blocks = (call.n + kMatmulScaleBlock - 1) / kMatmulScaleBlock;
    tables.lhs_scales[group] = call.lhs_scales + rows.first;
    tables.rhs_scales[group] = call.rhs_scales + group * n_blocks * k_blocks;
    auto& stride = cute::get<1>(cute::get<1>(tables.lhs_scales_layouts[group].stride()));
    stride = static_cast<int32_t>(call.n_rows);
  }
}

// Few: a tile of 64 x 256 takes 12/13 of the time of one of 128 x 256, and pays if it has all rows
// of most groups. Many: tiles of 128 x 128 in turns hide the time of storing them, and pay from
// about 512 rows per group on; below, they read the weights from the L2 cache too often.
__device__ inline RowCount Classify(int n_groups, int n_small_tiles, int n_large_tiles) {
  if (12 * int64_t{n_small_tiles} < 13 * int64_t{n_large_tiles}) return RowCount::kFew;
  return n_large_tiles < 4 * int64_t{n_groups} ? RowCount::kSome : RowCount::kMany;
}

constexpr int kTableThreads = 256;

// The first block fills the tables. All of them zero what the matmul does not write.
template <MatmulForm kForm, class Kernel>
__global__ void __launch_bounds__(kTableThreads)
    FillTables(const __grid_constant__ MatmulCall call,
               const __grid_constant__ GroupTables<Kernel> tables) {
  p2p::griddepcontrol_wait();
  if (blockIdx.x == 0) {
    __shared__ int sums[3];
    if (threadIdx.x < 3) sums[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t group = threadIdx.x; group < call.n_groups; group += kTableThreads) {
      const RowRange rows = RowRange::Of(call, group);
      FillEntry<kForm>(call, tables, group, rows);
      atomicAdd(&sums[0], rows.size > 0);
      atomicAdd(&sums[1], static_cast<int>((rows.size + 63) / 64));
      atomicAdd(&sums[2], static_cast<int>((rows.size + 127) / 128));
    }
    __syncthreads();
    if (threadIdx.x == 0) *tables.row_count = Classify(sums[0], sums[1], sums[2]);
  }
  ZeroUnwritten(call);
}

}  // namespace jax_ep::matmul::hopper
