// Makes the tensor maps of the grouped matmul of e4m3.

#include "layer/matmul/hopper/hopper_scaled.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "layer/matmul/hopper/tensor_maps.h"

namespace jax_ep::matmul::scaled {
namespace {

// Two codes are copied as one word of 16 bits.
constexpr cuuint32_t kBoxWords = kScaleBlock / 2;

// Of [L, n, k]: axes k, column of a half, half, group. There are two halves, gates and ups, or one
// of all columns.
cudaError_t MapWeights(EncodeTensorMap encode, const MatmulCall& call, uint32_t n_halves,
                       bool is_interleaved, CUtensorMap* map) {
  const auto n_groups = static_cast<cuuint64_t>(call.n_groups);
  const auto k = static_cast<cuuint64_t>(call.k), n = static_cast<cuuint64_t>(call.n);
  const cuuint64_t half = n / n_halves;
  const cuuint64_t to_column = is_interleaved ? n_halves * k : k;
  const cuuint64_t to_half = is_interleaved ? k : half * k;
  return MakeTensorMap<4>(encode, call.rhs, {k / 2, half, n_halves, n_groups},
                          {to_column, to_half, n * k}, {kBoxWords, kBlockColumns, 1, 1}, map);
}

cudaError_t MakeParams(const MatmulCall& call, const MatmulTileTable& tiles, uint32_t n_halves,
                       bool is_interleaved, void* out, Params& params) {
  const auto n_rows = static_cast<cuuint64_t>(call.n_rows);
  const auto k = static_cast<cuuint64_t>(call.k);
  EncodeTensorMap encode;
  cudaError_t error = FindEncodeTensorMap(encode);
  if (error == cudaSuccess) {
    error = MapWeights(encode, call, n_halves, is_interleaved, &params.weights);
  }
  for (uint32_t i = 0; i < 2 && error == cudaSuccess; ++i) {
    error = MakeTensorMap<2>(encode, call.lhs, {k / 2, n_rows}, {k},
                             {kBoxWords, i == 0 ? kGroupRows : kBlockRows}, &params.rows[i]);
  }
  params.tiles = tiles;
  params.n_rows = static_cast<uint32_t>(call.n_rows);
  params.n_groups = static_cast<uint32_t>(call.n_groups);
  params.n_columns = static_cast<uint32_t>(call.n);
  params.n_k_blocks = static_cast<uint32_t>(call.k / kScaleBlock);
  params.row_scales = call.lhs_scales;
  params.weight_scales = call.rhs_scales;
  params.out = out;
  return error;
}

}  // namespace

cudaError_t MakeParams(const MatmulCall& call, const MatmulTileTable& tiles, Params& params) {
  return MakeParams(call, tiles, /*n_halves=*/1, /*is_interleaved=*/false, call.out, params);
}

cudaError_t MakeParams(const MatmulCall& call, const Gate& gate, const MatmulTileTable& tiles,
                       GatedParams& params) {
  params.is_interleaved = gate.is_interleaved;
  params.activation = gate.activation;
  params.bias = static_cast<const uint16_t*>(gate.bias);
  params.scales = gate.scales;
  return MakeParams(call, tiles, /*n_halves=*/2, gate.is_interleaved, gate.values, params);
}

}  // namespace jax_ep::matmul::scaled
