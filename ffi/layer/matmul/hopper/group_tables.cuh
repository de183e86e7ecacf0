// The tables that CUTLASS's kernels read, and the kernel that fills them from the row offsets.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "layer/matmul/hopper/cutlass_kernels.cuh"
#include "layer/matmul/hopper/kernel_choice.cuh"
#include "layer/matmul/hopper/swapped_tables.cuh"
#include "layer/matmul/matmul_call.h"
#include "layer/matmul/row_range.cuh"
#include "p2p/device/ptx.cuh"

namespace jax_ep::matmul::hopper {

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
  Choice* choice;  // one
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

constexpr int kTableThreads = 256;

// The first block fills the tables. All of them zero what the matmul does not write.
template <MatmulForm kForm, class Kernel>
__global__ void __launch_bounds__(kTableThreads)
    FillTables(const __grid_constant__ MatmulCall call,
               const __grid_constant__ GroupTables<Kernel> tables,
               const __grid_constant__ SwappedTables swapped) {
  p2p::griddepcontrol_launch_dependents();  // the matmul may start, and waits
  p2p::griddepcontrol_wait();
  if (blockIdx.x == 0) {
    __shared__ GroupSums sums;
    if (threadIdx.x == 0) sums = {};
    __syncthreads();
    GroupSums own{};
    for (int64_t group = threadIdx.x; group < call.n_groups; group += kTableThreads) {
      const RowRange rows = RowRange::Of(call, group);
      FillEntry<kForm>(call, tables, group, rows);
      own.Add(rows.size);
    }
    if (threadIdx.x / 32 * 32 < call.n_groups) own.AddTo(sums);
    __syncthreads();
    const Choice choice = swapped.Choose(sums);
    if (threadIdx.x == 0) *tables.choice = choice;
    if (choice.kernel == KernelChoice::kSwapped) {
      FillSwappedTable(call, swapped.tiles, choice.max_tile_rows);
    }
  }
  ZeroUnwritten(call);
}

}  // namespace jax_ep::matmul::hopper
