// The gradient of the weights of grouped matmuls, for Hopper.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "layer/matmul/hopper/weight_gradient.cuh"
#include "layer/matmul/kernels.h"
#include "layer/matmul/row_range.cuh"
#include "p2p/launch/launch.h"

namespace jax_ep::matmul::hopper {
namespace {

using namespace weight_gradient;

constexpr int kTableThreads = 256;

// Enters the group, behind those that have more rows. The largest are taken first, so that clusters
// end at about the same time. `rows` [n_groups]: see Table.
__device__ void Enter(const uint2* rows, int64_t n_groups, const Table& table, int64_t group) {
  const auto [first, size] = rows[group];
  uint32_t position = 0, n_spans = 0;
  for (int64_t other = 0; other < n_groups; ++other) {
    const uint32_t other_size = rows[other].y;
    n_spans += other_size > 0;
    position += other_size > size || (other_size == size && other < group);
  }
  if (group == 0) *table.n_spans = n_spans, *table.n_taken = 0;
  if (size > 0) table.spans[position] = {first, size, static_cast<uint32_t>(group), 0};
}

// Called by all threads of a block. Reads the row offsets once, since they may change meanwhile,
// and the groups would not get a position each.
__device__ void EnterAll(const MatmulCall& call, const Table& table) {
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
  for_each_group([&](int64_t group) { Enter(rows, call.n_groups, table, group); });
}

// The first block fills the table. All of them zero the matrices of groups without rows, unless the
// call adds to them.
__global__ void __launch_bounds__(kTableThreads)
    FillTable(const __grid_constant__ MatmulCall call, const __grid_constant__ Table table) {
  p2p::griddepcontrol_launch_dependents();  // the matmul may start, and waits
  p2p::griddepcontrol_wait();
  if (blockIdx.x == 0) EnterAll(call, table);
  ZeroUnwritten(call);
}

template <class Terms, class Result>
__global__ void __launch_bounds__(kThreads, 1)
    MultiplyAlongRows(const __grid_constant__ Params params) {
  // Of a thread; together as many as all threads have at the start, 168 each.
  constexpr int kComputeRegisters = 224, kLoadRegisters = 56;
  extern __shared__ char unaligned[];
  uint32_t smem = p2p::cvta_shared(unaligned);
  smem += (-smem) % kSmemAlignment;
  p2p::opaque(smem);
  if (threadIdx.x == 0) InitBarriers(smem);
  if (threadIdx.x == kWarpGroups * kGroupThreads) {
    prefetch_tensormap(&params.lhs);
    prefetch_tensormap(&params.rhs);
    prefetch_tensormap(&params.out);
  }
  cluster_sync();
  p2p::griddepcontrol_wait();
  if (threadIdx.x < kWarpGroups * kGroupThreads) {
    setmaxnreg_inc<kComputeRegisters>();
    Compute<Terms, Result>(smem);
  } else {
    setmaxnreg_dec<kLoadRegisters>();
    const uint32_t thread = threadIdx.x - kWarpGroups * kGroupThreads;
    if (thread == 0) Load(params, smem);
    if (thread % 32 == 0 && thread / 32 - 1 < kWarpGroups) {
      Store<Result>(params, smem, thread / 32 - 1);
    }
  }
  __syncwarp();
  cluster_sync();  // the other block may still release stages here
}

// Null if there is no such kernel.
auto FindKernel(const MatmulCall& call) -> void (*)(Params) {
  if (call.accumulates && call.out_type == RowType::kFloat32) {
    if (call.element == Element::kBFloat16) return MultiplyAlongRows<BFloat16Terms, Add>;
    if (call.element == Element::kFloat16) return MultiplyAlongRows<Float16Terms, Add>;
    return nullptr;
  }
  const bool is_bfloat16 =
      call.element == Element::kBFloat16 && call.out_type == RowType::kBFloat16;
  return is_bfloat16 && !call.accumulates ? MultiplyAlongRows<BFloat16Terms, Replace> : nullptr;
}

}  // namespace

cudaError_t LaunchWeightGradient(const MatmulCall& call, LaunchMode mode) {
  const auto kernel = FindKernel(call);
  if (kernel == nullptr || call.form != MatmulForm::kRows) return cudaErrorInvalidValue;
  if (mode.only_loads()) return LoadAhead(FillTable, kernel);
  int n_sms = 0;
  cudaError_t error = p2p::CountSms(&n_sms);
  if (error != cudaSuccess) return error;
  Params params;
  error = MakeParams(call, params);
  if (error != cudaSuccess) return error;
  p2p::LaunchShape shape{dim3(NumZeroBlocks(call, n_sms)), kTableThreads, 0, mode.stream()};
  shape.starts_early = true;
  error = p2p::LaunchKernel(FillTable, shape, call, params.table);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(kSmemBytes));
  if (error != cudaSuccess) return error;
  shape.grid = dim3(static_cast<unsigned>(n_sms) / kBlocks * kBlocks);
  shape.cluster = dim3(kBlocks);
  shape.n_threads = kThreads;
  shape.smem_bytes = kSmemBytes;
  return p2p::LaunchKernel(kernel, shape, params);
}

}  // namespace jax_ep::matmul::hopper
