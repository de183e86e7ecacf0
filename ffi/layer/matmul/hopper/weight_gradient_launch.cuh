// Launches a kernel of weight_gradient.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "layer/matmul/hopper/weight_gradient.cuh"
#include "layer/matmul/kernels.h"
#include "layer/matmul/row_range.cuh"
#include "p2p/launch/launch.h"

namespace jax_ep::matmul::weight_gradient {

constexpr int kTableThreads = 256;

// Enters the group, behind those that have more rows. The largest are taken first, so that clusters
// end at about the same time. `rows` [n_groups]: see Table. `is_padded`: whether a group begins
// where the blocks of rows of the groups before it end.
__device__ inline void Enter(const uint2* rows, int64_t n_groups, bool is_padded,
                             const Table& table, int64_t group) {
  constexpr auto kBlock = static_cast<uint32_t>(kMatmulScaleBlock);
  const auto [first, size] = rows[group];
  uint32_t position = 0, n_spans = 0, n_blocks = 0;
  for (int64_t other = 0; other < n_groups; ++other) {
    const uint32_t other_size = rows[other].y;
    n_spans += other_size > 0;
    position += other_size > size || (other_size == size && other < group);
    n_blocks += other < group ? (other_size + kBlock - 1) / kBlock : 0;
  }
  if (group == 0) *table.n_spans = n_spans, *table.n_taken = 0;
  const uint32_t begin = is_padded ? n_blocks * kBlock : first;
  if (size > 0) table.spans[position] = {begin, size, static_cast<uint32_t>(group), 0};
}

// Called by all threads of a block. Reads the row offsets once, since they may change meanwhile,
// and the groups would not get a position each.
__device__ inline void EnterAll(const MatmulCall& call, const Table& table) {
  constexpr int64_t kFewGroups = 512;
  __shared__ uint2 few[kFewGroups];
  uint2* const rows = call.n_groups <= kFewGroups ? few : table.rows;
  const auto for_each_group = [&](const auto& work) {
    for (int64_t group = threadIdx.x; group < call.n_groups; group += kTableThreads) work(group);
  };
  for_each_group([&](int64_t group) {
    const RowRange range = RowRange::Of(call, group);
    rows[group] = {static_cast<uint32_t>(range.first), static_cast<uint32_t>(range.size)};
  });
  __syncthreads();
  const bool is_padded = call.element == Element::kE4m3;
  for_each_group([&](int64_t group) { Enter(rows, call.n_groups, is_padded, table, group); });
}

// The first block fills the table. All of them zero the matrices of groups without rows, unless the
// call adds to them.
static __global__ void __launch_bounds__(kTableThreads)
    FillTable(const __grid_constant__ MatmulCall call, const __grid_constant__ Table table) {
  p2p::griddepcontrol_launch_dependents();  // the matmul may start, and waits
  p2p::griddepcontrol_wait();
  if (blockIdx.x == 0) EnterAll(call, table);
  ZeroUnwritten(call);
}

// `kComputeRegisters` and `kLoadRegisters`, of a thread: together as many as all threads have at
// the start, 168 each.
template <class Operands, class Result, int kComputeRegisters, int kLoadRegisters>
__global__ void __launch_bounds__(kThreads, 1)
    MultiplyAlongRows(const __grid_constant__ typename Operands::Params params) {
  static_assert(kWarpGroups * kComputeRegisters + kLoadRegisters <= 3 * 168);
  extern __shared__ char unaligned[];
  uint32_t smem = p2p::cvta_shared(unaligned);
  smem += (-smem) % kSmemAlignment;
  p2p::opaque(smem);
  if (threadIdx.x == 0) InitBarriers<Operands>(smem);
  if (threadIdx.x == kWarpGroups * kGroupThreads) {
    prefetch_tensormap(&params.lhs);
    prefetch_tensormap(&params.rhs);
    prefetch_tensormap(&params.out);
  }
  cluster_sync();
  p2p::griddepcontrol_wait();
  if (threadIdx.x < kWarpGroups * kGroupThreads) {
    setmaxnreg_inc<kComputeRegisters>();
    Compute<Operands, Result>(smem);
  } else {
    setmaxnreg_dec<kLoadRegisters>();
    const uint32_t thread = threadIdx.x - kWarpGroups * kGroupThreads;
    if (thread == 0) Load<Operands>(params, smem);
    if (thread % 32 == 0 && thread / 32 - 1 < kWarpGroups) {
      Store<Operands, Result>(params, smem, thread / 32 - 1);
    }
  }
  __syncwarp();
  cluster_sync();  // the other block may still release stages here
}

template <class Operands>
cudaError_t LaunchAlongRows(void (*kernel)(typename Operands::Params), const MatmulCall& call,
                            LaunchMode mode) {
  if (kernel == nullptr || call.form != MatmulForm::kRows) return cudaErrorInvalidValue;
  if (mode.only_loads()) return LoadAhead(FillTable, kernel);
  int n_sms = 0;
  cudaError_t error = p2p::CountSms(&n_sms);
  if (error != cudaSuccess) return error;
  typename Operands::Params params;
  error = MakeParams(call, params);
  if (error != cudaSuccess) return error;
  p2p::LaunchShape shape{dim3(NumZeroBlocks(call, n_sms)), kTableThreads, 0, mode.stream()};
  shape.starts_early = true;
  error = p2p::LaunchKernel(FillTable, shape, call, params.table);
  if (error != cudaSuccess) return error;
  shape.smem_bytes = SmemBytes<Operands>();
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shape.smem_bytes));
  if (error != cudaSuccess) return error;
  shape.grid = dim3(static_cast<unsigned>(n_sms) / kBlocks * kBlocks);
  shape.cluster = dim3(kBlocks);
  shape.n_threads = kThreads;
  return p2p::LaunchKernel(kernel, shape, params);
}

}  // namespace jax_ep::matmul::weight_gradient
