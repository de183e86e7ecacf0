#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/matmul/hopper_swapped.cuh"
#include "cuda/matmul/hopper_swapped.h"

namespace jax_ep::p2p {
namespace {

using Encode = PFN_cuTensorMapEncodeTiled_v12000;

cudaError_t FindEncode(Encode& encode) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &result);
  if (error != cudaSuccess) return error;
  if (result != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  encode = reinterpret_cast<Encode>(function);
  return cudaSuccess;
}

// A tensor of bfloat16, whose last axis is the first here, read by boxes whose lines are swizzled.
template <int kRank>
cudaError_t MakeMap(Encode encode, const void* data, const cuuint64_t (&sizes)[kRank],
                    const cuuint32_t (&box)[kRank], CUtensorMap* map) {
  cuuint64_t strides[kRank - 1];
  cuuint32_t steps[kRank];
  cuuint64_t bytes = 2;
  for (int i = 0; i + 1 < kRank; ++i) strides[i] = bytes *= sizes[i];
  std::fill_n(steps, kRank, 1);
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kRank, const_cast<void*>(data), sizes, strides,
             box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t MakeArgs(const MatmulCall& call, const SwappedTables& tables, swapped::Args& args) {
  Encode encode;
  cudaError_t error = FindEncode(encode);
  if (error != cudaSuccess) return error;
  const auto n_rows = static_cast<cuuint64_t>(call.n_rows);
  const auto n_groups = static_cast<cuuint64_t>(call.n_groups);
  const auto k = static_cast<cuuint64_t>(call.k), n = static_cast<cuuint64_t>(call.n);
  error = MakeMap<3>(encode, call.rhs, {n, k, n_groups},
                     {swapped::kGroupColumns, swapped::kDepth, 1}, &args.weights);
  for (uint32_t i = 0; i < swapped::kMaxHalves && error == cudaSuccess; ++i) {
    error = MakeMap<2>(encode, call.lhs, {k, n_rows},
                       {swapped::kDepth, (i + 1) * swapped::kRowUnit}, &args.rows[i]);
  }
  args.tables = tables;
  args.n_groups = static_cast<uint32_t>(n_groups);
  args.n_columns = static_cast<uint32_t>(n);
  args.n_k_blocks = static_cast<uint32_t>((k + swapped::kDepth - 1) / swapped::kDepth);
  args.out = call.out;
  return error;
}

}  // namespace

cudaError_t LaunchSwappedMatmul(const MatmulCall& call, const SwappedTables& tables, int n_sms,
                                cudaStream_t stream) {
  swapped::Args args{};
  cudaError_t error = MakeArgs(call, tables, args);
  if (error != cudaSuccess) return error;
  constexpr auto kBytes = static_cast<int>(swapped::kSmemBytes);
  const auto kernel = swapped::MultiplySwapped;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(n_sms) / swapped::kBlocks * swapped::kBlocks);
  config.blockDim = dim3(swapped::kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args);
}

}  // namespace jax_ep::p2p
