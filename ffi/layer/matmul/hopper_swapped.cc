// Makes the tensor maps of the grouped matmul with swapped operands.

#include "layer/matmul/hopper_swapped.h"

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

namespace jax_ep::matmul::swapped {
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

}  // namespace

cudaError_t MakeParams(const MatmulCall& call, const MatmulTileTable& tiles, Params& params) {
  Encode encode;
  cudaError_t error = FindEncode(encode);
  if (error != cudaSuccess) return error;
  const auto n_rows = static_cast<cuuint64_t>(call.n_rows);
  const auto n_groups = static_cast<cuuint64_t>(call.n_groups);
  const auto k = static_cast<cuuint64_t>(call.k), n = static_cast<cuuint64_t>(call.n);
  error =
      MakeMap<3>(encode, call.rhs, {n, k, n_groups}, {kGroupColumns, kDepth, 1}, &params.weights);
  for (uint32_t i = 0; i < kMaxHalves && error == cudaSuccess; ++i) {
    error = MakeMap<2>(encode, call.lhs, {k, n_rows}, {kDepth, (i + 1) * kMatmulRowUnit},
                       &params.rows[i]);
  }
  params.tiles = tiles;
  params.n_groups = static_cast<uint32_t>(n_groups);
  params.n_columns = static_cast<uint32_t>(n);
  params.n_k_blocks = static_cast<uint32_t>((k + kDepth - 1) / kDepth);
  params.out = call.out;
  return error;
}

}  // namespace jax_ep::matmul::swapped
