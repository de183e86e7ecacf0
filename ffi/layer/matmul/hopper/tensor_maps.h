// Makes tensor maps, by which kernels for Hopper copy tiles.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <algorithm>

namespace jax_ep::matmul {

using EncodeTensorMap = PFN_cuTensorMapEncodeTiled_v12000;

inline cudaError_t FindEncodeTensorMap(EncodeTensorMap& encode) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &result);
  if (error != cudaSuccess) return error;
  if (result != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  encode = reinterpret_cast<EncodeTensorMap>(function);
  return cudaSuccess;
}

// A tensor of 16-bit floats, of pairs of codes, or of float32, whose last axis is the first here,
// copied in boxes whose lines, of 64 or 128 bytes, are swizzled. `strides`: in bytes, of all axes
// but the first.
template <int kRank>
cudaError_t MakeTensorMap(EncodeTensorMap encode, const void* data,
                          const cuuint64_t (&sizes)[kRank], const cuuint64_t (&strides)[kRank - 1],
                          const cuuint32_t (&box)[kRank], CUtensorMap* map,
                          bool is_float32 = false) {
  const auto type = is_float32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const cuuint32_t line_bytes = box[0] * (is_float32 ? 4 : 2);
  cuuint32_t steps[kRank];
  std::fill_n(steps, kRank, 1);
  const auto swizzle = line_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  const CUresult result =
      encode(map, type, kRank, const_cast<void*>(data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace jax_ep::matmul
