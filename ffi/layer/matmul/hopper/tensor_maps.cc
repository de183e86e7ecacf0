// Makes the tensor maps by which the kernels of our own copy tiles.

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>

#include "layer/matmul/hopper/params.h"

namespace jax_ep::matmul {
namespace {

using EncodeTensorMap = PFN_cuTensorMapEncodeTiled_v12000;

cudaError_t FindEncodeTensorMap(EncodeTensorMap& encode) {
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
// copied in boxes whose lines, of 64 or 128 bytes, are swizzled; longer ones are not. `strides`: in
// bytes, of all axes but the first.
template <int kRank>
cudaError_t MakeTensorMap(EncodeTensorMap encode, const void* data,
                          const cuuint64_t (&sizes)[kRank], const cuuint64_t (&strides)[kRank - 1],
                          const cuuint32_t (&box)[kRank], CUtensorMap* map,
                          bool is_float32 = false) {
  const auto type = is_float32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const cuuint32_t line_bytes = box[0] * (is_float32 ? 4 : 2);
  cuuint32_t steps[kRank];
  std::fill_n(steps, kRank, 1);
  const auto swizzle = line_bytes > 128    ? CU_TENSOR_MAP_SWIZZLE_NONE
                       : line_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B
                                           : CU_TENSOR_MAP_SWIZZLE_64B;
  const CUresult result =
      encode(map, type, kRank, const_cast<void*>(data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace
}  // namespace jax_ep::matmul

namespace jax_ep::matmul::swapped {
namespace {

// Of [L, k, n] or [L, n, k]. Gates and ups that lie apart are an axis of their own.
cudaError_t MapWeights(EncodeTensorMap encode, const MatmulCall& call, bool are_apart,
                       CUtensorMap* map) {
  const auto n_groups = static_cast<cuuint64_t>(call.n_groups);
  const auto k = static_cast<cuuint64_t>(call.k), n = static_cast<cuuint64_t>(call.n);
  if (are_apart) {
    return MakeTensorMap<4>(encode, call.rhs, {n / 2, k, 2, n_groups}, {2 * n, n, 2 * n * k},
                            {kGroupColumns / 2, kDepth, 2, 1}, map);
  }
  if (call.form == MatmulForm::kTransposedWeights) {
    return MakeTensorMap<3>(encode, call.rhs, {k, n, n_groups}, {2 * k, 2 * n * k},
                            {kDepth, kGroupColumns, 1}, map);
  }
  return MakeTensorMap<3>(encode, call.rhs, {n, k, n_groups}, {2 * n, 2 * n * k},
                          {kGroupColumns, kDepth, 1}, map);
}

cudaError_t MakeParams(const MatmulCall& call, const MatmulTileTable& tiles, bool are_apart,
                       void* out, Params& params) {
  const auto n_rows = static_cast<cuuint64_t>(call.n_rows);
  const auto k = static_cast<cuuint64_t>(call.k);
  EncodeTensorMap encode;
  cudaError_t error = FindEncodeTensorMap(encode);
  if (error == cudaSuccess) error = MapWeights(encode, call, are_apart, &params.weights);
  for (uint32_t i = 0; i < kMaxHalves && error == cudaSuccess; ++i) {
    error = MakeTensorMap<2>(encode, call.lhs, {k, n_rows}, {2 * k},
                             {kDepth, (i + 1) * kMatmulRowUnit}, &params.rows[i]);
  }
  params.tiles = tiles;
  params.n_groups = static_cast<uint32_t>(call.n_groups);
  params.n_columns = static_cast<uint32_t>(call.n);
  params.n_k_blocks = static_cast<uint32_t>((k + kDepth - 1) / kDepth);
  params.out = out;
  return error;
}

// Of the device, from its memory's clock rate and width. A driver may hide these.
std::optional<int64_t> MemoryBytesPerSecond(int device) {
  int kilohertz = 0, n_bits = 0;
  cudaError_t error = cudaDeviceGetAttribute(&kilohertz, cudaDevAttrMemoryClockRate, device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&n_bits, cudaDevAttrGlobalMemoryBusWidth, device);
  }
  if (error != cudaSuccess) {
    cudaGetLastError();
    return std::nullopt;
  }
  return 2 * 1000 * int64_t{kilohertz} * n_bits / 8;  // two transfers per cycle
}

}  // namespace

cudaError_t IsMemorySlow(bool* is_slow) {
  enum Answer : int { kNotAsked, kNo, kYes };
  constexpr int kMaxDevices = 64;
  static std::atomic<int> answers[kMaxDevices];  // the driver may take long to answer
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  std::atomic<int>* const known = device < kMaxDevices ? &answers[device] : nullptr;
  int answer = known == nullptr ? kNotAsked : known->load(std::memory_order_relaxed);
  if (answer == kNotAsked) {
    const std::optional<int64_t> rate = MemoryBytesPerSecond(device);
    answer = rate && *rate < 4'200'000'000'000 ? kYes : kNo;
    if (known != nullptr) known->store(answer, std::memory_order_relaxed);
  }
  *is_slow = answer == kYes;
  return cudaSuccess;
}

cudaError_t MakeParams(const MatmulCall& call, const MatmulTileTable& tiles, Params& params) {
  return MakeParams(call, tiles, /*are_apart=*/false, call.out, params);
}

cudaError_t MakeParams(const MatmulCall& call, const Gate& gate, const MatmulTileTable& tiles,
                       GatedParams& params) {
  params.activation = gate.activation;
  params.hidden = gate.keeps_hidden ? call.out : nullptr;
  params.bias = gate.bias;
  return MakeParams(call, tiles, /*are_apart=*/!gate.is_interleaved, gate.values, params);
}

cudaError_t MakeParams(const MatmulCall& call, const GatedGradient& gradient,
                       const MatmulTileTable& tiles, GatedGradientParams& params) {
  params.activation = gradient.activation;
  params.hidden = gradient.hidden;
  return MakeParams(call, tiles, /*are_apart=*/false, gradient.of_hidden, params);
}

}  // namespace jax_ep::matmul::swapped

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

namespace jax_ep::matmul::weight_gradient {
namespace {

// All but the operands' maps. A line of results in shared memory has `line_bytes`.
cudaError_t MakeResultParams(EncodeTensorMap encode, const MatmulCall& call, cuuint32_t line_bytes,
                             Params& params) {
  const auto n_groups = static_cast<cuuint64_t>(call.n_groups);
  const auto k = static_cast<cuuint64_t>(call.k), n = static_cast<cuuint64_t>(call.n);
  params.table = Table::In(call);
  params.n_rows = static_cast<uint32_t>(k);
  params.n_columns = static_cast<uint32_t>(n);
  const auto out_bytes = static_cast<cuuint32_t>(ElementBytes(call.out_type));
  return MakeTensorMap<3>(encode, call.out, {n, k, n_groups}, {out_bytes * n, out_bytes * n * k},
                          {line_bytes / out_bytes, kGroupRows, 1}, &params.out,
                          call.out_type == RowType::kFloat32);
}

// Codes of `n_columns` columns, two in a word, and the scales of their blocks of rows.
cudaError_t MapCodes(EncodeTensorMap encode, const MatmulCall& call, const void* codes,
                     const float* scales, cuuint64_t n_columns, CUtensorMap* map,
                     CUtensorMap* scales_map) {
  constexpr auto kBlock = static_cast<cuuint32_t>(kMatmulScaleBlock);
  const auto n_rows = static_cast<cuuint64_t>(call.n_rows);
  const cudaError_t error =
      MakeTensorMap<2>(encode, codes, {n_rows / 2, n_columns}, {n_rows}, {kBlock / 2, kBlock}, map);
  if (error != cudaSuccess) return error;
  return MakeTensorMap<2>(encode, scales, {n_columns, n_rows / kBlock}, {4 * n_columns},
                          {kBlock, 1}, scales_map, /*is_float32=*/true);
}

}  // namespace

cudaError_t MakeParams(const MatmulCall& call, Params& params) {
  const auto n_rows = static_cast<cuuint64_t>(call.n_rows);
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
  return MakeResultParams(encode, call, kLineBytes, params);
}

cudaError_t MakeParams(const MatmulCall& call, CodesParams& params) {
  const auto k = static_cast<cuuint64_t>(call.k), n = static_cast<cuuint64_t>(call.n);
  EncodeTensorMap encode;
  cudaError_t error = FindEncodeTensorMap(encode);
  if (error != cudaSuccess) return error;
  error = MapCodes(encode, call, call.lhs, call.lhs_scales, k, &params.lhs, &params.lhs_scales);
  if (error != cudaSuccess) return error;
  error = MapCodes(encode, call, call.rhs, call.rhs_scales, n, &params.rhs, &params.rhs_scales);
  if (error != cudaSuccess) return error;
  return MakeResultParams(encode, call, kCodesLineBytes, params);
}

}  // namespace jax_ep::matmul::weight_gradient
