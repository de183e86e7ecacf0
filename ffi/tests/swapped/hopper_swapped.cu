#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "tests/swapped/hopper_swapped.cuh"
#include "tests/swapped/hopper_swapped.h"

namespace jax_ep::matmul {
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

cudaError_t MakeArgs(const MatmulCall& call, MatmulTimeout* timeout, swapped::Args& args) {
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
  args.shape = {call.row_offsets, static_cast<uint32_t>(n_rows), static_cast<uint32_t>(n_groups),
                static_cast<uint32_t>(n), 0};
  args.n_k_blocks = static_cast<uint32_t>((k + swapped::kDepth - 1) / swapped::kDepth);
  args.zeroes_unused = call.zeroes_unused;
  args.out = call.out;
  args.timeout = timeout;
  return error;
}

bool HasKernel(const MatmulCall& call) {
  const int64_t largest = std::max({call.n_rows, call.n_groups, call.k, call.n});
  return call.form == MatmulForm::kWeights && call.element == Element::kBFloat16 &&
         call.out_type == RowType::kBFloat16 && call.k % 8 == 0 && call.n % 8 == 0 &&
         largest <= INT32_MAX;
}

template <class Schedule>
cudaError_t LaunchKernel(swapped::Args& args, cudaStream_t stream) {
  args.shape.max_tile_rows = Schedule::kMaxRows;
  int device = 0, n_sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  constexpr auto kBytes = static_cast<int>(swapped::SmemBytes<Schedule>());
  const auto kernel = swapped::MultiplySwapped<Schedule>;
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

}  // namespace

cudaError_t LaunchSwappedMatmul(const MatmulCall& call, cudaStream_t stream, SwappedVariant variant,
                                MatmulTimeout* timeout) {
  if (!HasKernel(call)) return cudaErrorInvalidValue;
  if (call.n_groups == 0 || call.out_elements() == 0) return cudaSuccess;
  if (call.k == 0 || call.n_rows == 0) {
    const auto n_bytes = static_cast<size_t>(call.out_elements() * ElementBytes(call.out_type));
    return cudaMemsetAsync(call.out, 0, n_bytes, stream);
  }
  swapped::Args args{};
  const cudaError_t error = MakeArgs(call, timeout, args);
  if (error != cudaSuccess) return error;
  switch (variant) {
    case SwappedVariant::k256:
      return LaunchKernel<swapped::Schedule<256, 4, 0, 64>>(args, stream);
    case SwappedVariant::k256Lead:
      return LaunchKernel<swapped::Schedule<256, 4, 1, 64>>(args, stream);
    case SwappedVariant::k192Lead:
      return LaunchKernel<swapped::Schedule<192, 5, 1, 48>>(args, stream);
    case SwappedVariant::k128Lead:
      return LaunchKernel<swapped::Schedule<128, 6, 1, 64>>(args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_ep::matmul
