// Times the gradient of rows that also computes that of the activation before them
// (layer/matmul/gated.h) beside the two calls that it stands for: the matmul, with the
// kernel that is chosen, and the gradient of fused_silu.
//
//   gated_gradient_probe

#include "layer/activation/cuda_silu.h"
#include "layer/matmul/gated.h"
#include "tests/bench/gated_timing.cuh"
#include "tests/unit/separate_calls.h"

namespace jax_ep::matmul {
namespace {

struct Backward {
  static MatmulCall Call(const GatedBuffers& set, const GatedModel& model,
                         const Buffer& row_offsets, int64_t n_rows) {
    return set.Call(MatmulForm::kTransposedWeights, model, model.expert_size, set.values,
                    row_offsets, n_rows);
  }
  static cudaError_t LaunchOther(const MatmulCall& call, const GatedBuffers& set) {
    return silu::LaunchSiluGradient(ActivationGradientOf(call, GradientOf(set)), kTimedStream);
  }
  static cudaError_t LaunchOne(const MatmulCall& call, const GatedBuffers& set, hopper::Swap) {
    return hopper::LaunchGatedGradient(call, GradientOf(set), kTimedStream);
  }

 private:
  static GatedGradient GradientOf(const GatedBuffers& set) {
    return {false, {}, set.hidden.As<void>(), set.of_hidden.As<void>()};
  }
};

}  // namespace
}  // namespace jax_ep::matmul

int main() { jax_ep::matmul::TimeGated<jax_ep::matmul::Backward>(); }
