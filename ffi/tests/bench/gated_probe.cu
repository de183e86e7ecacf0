// Times a matmul that also computes the activation (layer/matmul/gated.h) beside the two calls that
// it stands for: the matmul, with the kernel that is chosen, and fused_silu.
//
//   gated_probe           the values only, as without gradients
//   gated_probe hidden    the hidden rows, too, as for a gradient

#include <string_view>

#include "layer/activation/cuda_silu.h"
#include "layer/matmul/gated.h"
#include "tests/bench/gated_timing.cuh"
#include "tests/unit/separate_calls.h"

namespace jax_ep::matmul {
namespace {

struct Forward {
  static inline bool keeps_hidden = false;

  static MatmulCall Call(const GatedBuffers& set, const GatedModel& model,
                         const Buffer& row_offsets, int64_t n_rows) {
    return set.Call(MatmulForm::kWeights, model, 2 * model.expert_size, set.hidden, row_offsets,
                    n_rows);
  }
  static cudaError_t LaunchOther(const MatmulCall& call, const GatedBuffers& set) {
    return silu::LaunchFusedSilu(ActivationOf(call, GateOf(set)), kTimedStream);
  }
  static cudaError_t LaunchOne(const MatmulCall& call, const GatedBuffers& set, hopper::Swap swap) {
    return hopper::LaunchGated(call, GateOf(set), kTimedStream, swap);
  }

 private:
  static Gate GateOf(const GatedBuffers& set) {
    Gate gate{};
    gate.values = set.values.As<void>();
    gate.keeps_hidden = keeps_hidden;
    return gate;
  }
};

}  // namespace
}  // namespace jax_ep::matmul

int main(int n_args, char** args) {
  using jax_ep::matmul::Forward;
  Forward::keeps_hidden = n_args > 1 && std::string_view(args[1]) == "hidden";
  jax_ep::matmul::TimeGated<Forward>();
}
