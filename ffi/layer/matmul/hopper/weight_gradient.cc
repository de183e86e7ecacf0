// Makes the tensor maps of the grouped matmul along rows.

#include "layer/matmul/hopper/weight_gradient.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "layer/matmul/hopper/tensor_maps.h"

namespace jax_ep::matmul::weight_gradient {

cudaError_t MakeParams(const MatmulCall& call, Params& params) {
  const auto n_rows = static_cast<cuuint64_t>(call.n_rows);
  const auto n_groups = static_cast<cuuint64_t>(call.n_groups);
  const auto k = static_cast<cuuint64_t>(call.k), n = static_cast<cuuint64_t>(call.n);
  EncodeTensorMap encode;
  cudaError_t error = FindEncodeTensorMap(encode);
  if (error != cudaSuccess) return error;
  error =
      MakeTensorMap<2>(encode, call.lhs, {k, n_rows}, {2 * k}, {kLineColumns, kDepth}, &params.lhs);
  if (error != cudaSuccess) return error;
  error =
      MakeTensorMap<2>(encode, call.rhs, {n, n_rows}, {2 * n}, {kLineColumns, kDepth}, &params.rhs);
  if (error != cudaSuccess) return error;
  params.table = Table::In(call);
  params.n_rows = static_cast<uint32_t>(k);
  params.n_columns = static_cast<uint32_t>(n);
  const auto out_bytes = static_cast<cuuint32_t>(ElementBytes(call.out_type));
  return MakeTensorMap<3>(encode, call.out, {n, k, n_groups}, {out_bytes * n, out_bytes * n * k},
                          {kLineBytes / out_bytes, kGroupRows, 1}, &params.out,
                          call.out_type == RowType::kFloat32);
}

}  // namespace jax_ep::matmul::weight_gradient
