#include "layer/matmul/gated.h"

#include <algorithm>
#include <cstdint>

#include "layer/silu/cuda_silu.h"

namespace jax_ep::matmul {
namespace {

#ifdef JAX_EP_MATMUL_HOPPER
// Whether one kernel can do the work.
bool MayGate(const MatmulCall& call) {
  const int64_t largest = std::max({call.n_rows, call.n_groups, call.k, call.n});
  const int64_t least = std::min({call.n_rows, call.n_groups, call.k, call.n});
  return IsHopper() && call.k % 8 == 0 && call.n % 16 == 0 &&
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
  silu.token_format = "plain_bfloat16";
  silu.scales_layout = ScalesLayout::kNone;
  silu.is_interleaved = gate.is_interleaved;
  silu.activation = gate.activation;
  silu.n_rows = call.n_rows, silu.n_groups = call.n_groups;
  silu.row_size = call.n / 2;
  silu.x_type = silu.out_type = RowType::kBFloat16;
  silu.x = call.out;
  silu.row_offsets = call.row_offsets;
  silu.out = gate.values;
  return silu;
}

cudaError_t LaunchGated(const MatmulCall& call, const Gate& gate, LaunchMode mode,
                        [[maybe_unused]] hopper::Swap swap) {
#ifdef JAX_EP_MATMUL_HOPPER
  using hopper::Swap;
  const bool should = swap == Swap::kByRows ? ShouldGate(call, gate) : swap != Swap::kNever;
  if (should && MayGate(call)) {
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

}  // namespace jax_ep::matmul
