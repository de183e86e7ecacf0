#include "layer/matmul/gated.h"

#include <algorithm>
#include <cstdint>

#include "layer/activation/cuda_silu.h"

namespace jax_ep::matmul {
namespace {

#ifdef JAX_EP_MATMUL_HOPPER
// Whether one kernel can do the work, with k and n such multiples.
bool MayGate(const MatmulCall& call, int64_t k_multiple, int64_t n_multiple) {
  const int64_t largest = std::max({call.n_rows, call.n_groups, call.k, call.n});
  const int64_t least = std::min({call.n_rows, call.n_groups, call.k, call.n});
  return IsHopper() && call.k % k_multiple == 0 && call.n % n_multiple == 0 &&
         call.n_groups <= hopper::kMaxGatedGroups && least > 0 && largest <= INT32_MAX;
}

// Whether it is faster, with any rows unless hidden rows are kept. Then, with large k and few rows,
// it is not: what fused_silu would read is little. Smaller weights and k were not measured. Where
// there is a bias, nothing else adds it.
bool ShouldGate(const MatmulCall& call, const Gate& gate) {
  if (gate.bias != nullptr) return true;
  constexpr int64_t kSmallestK = 1024, kFewestWeights = 50'000'000;
  constexpr int64_t kLargeK = 4096, kFewRows = 128;  // of a group, on average
  if (call.k < kSmallestK || call.n_groups * call.k * call.n < kFewestWeights) return false;
  return !gate.keeps_hidden || call.k < kLargeK || call.n_rows >= kFewRows * call.n_groups;
}
#endif

}  // namespace

silu::SiluCall ActivationOf(const MatmulCall& call, const Gate& gate) {
  silu::SiluCall silu{};
  const bool is_e4m3 = call.element == Element::kE4m3;
  silu.token_format = is_e4m3 ? "blockwise_fp8" : "plain_bfloat16";
  silu.scales_layout = is_e4m3 ? ScalesLayout::kTransposed : ScalesLayout::kNone;
  silu.n_scales = is_e4m3 ? call.n / 2 / kMatmulScaleBlock : 0;
  silu.is_interleaved = gate.is_interleaved;
  silu.activation = gate.activation;
  silu.n_rows = call.n_rows, silu.n_groups = call.n_groups;
  silu.row_size = call.n / 2;
  silu.x_type = silu.out_type = RowType::kBFloat16;
  silu.x = call.out;
  silu.row_offsets = call.row_offsets;
  silu.out = gate.values;
  silu.scales = gate.scales;
  return silu;
}

cudaError_t LaunchGated(const MatmulCall& call, const Gate& gate, LaunchMode mode,
                        [[maybe_unused]] hopper::Swap swap) {
#ifdef JAX_EP_MATMUL_HOPPER
  using hopper::Swap;
  const bool should = swap == Swap::kByRows ? ShouldGate(call, gate) : swap != Swap::kNever;
  if (should && MayGate(call, 8, 16)) {
    const cudaError_t error = hopper::LaunchGatedBFloat16(call, gate, mode, swap);
    if (error != cudaSuccess) cudaGetLastError();  // clears it: the next launch must not report it
    return error;
  }
#endif
  if (gate.bias != nullptr) return cudaErrorInvalidValue;
  const cudaError_t error = LaunchMatmul(call, mode);
  if (error != cudaSuccess || mode.only_loads()) return error;
  return silu::LaunchFusedSilu(ActivationOf(call, gate), mode.stream());
}

cudaError_t LaunchGatedScaled([[maybe_unused]] const MatmulCall& call,
                              [[maybe_unused]] const Gate& gate, [[maybe_unused]] LaunchMode mode) {
#ifdef JAX_EP_MATMUL_HOPPER
  if (std::min({call.n_rows, call.n_groups, call.n}) == 0) return cudaSuccess;
  if (MayGate(call, kMatmulScaleBlock, 2 * kMatmulScaleBlock)) {
    const cudaError_t error = hopper::LaunchGatedE4m3(call, gate, mode);
    if (error != cudaSuccess) cudaGetLastError();
    return error;
  }
#endif
  return cudaErrorInvalidValue;
}

}  // namespace jax_ep::matmul
