// Makes the tensor maps of the grouped matmul with swapped operands.

#include "layer/matmul/hopper/hopper_swapped.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <optional>

#include "layer/matmul/hopper/tensor_maps.h"

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
