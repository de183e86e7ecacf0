// Times the matmul with scales (layer/matmul/hopper/hopper_scaled.cuh) beside CUTLASS's and
// the one of bfloat16, and the same with the activation of its result beside the two calls that it
// stands for.
//
//   scaled_probe ["K7168 N4096": of this shape only]

#include <cstdint>
#include <cstdio>
#include <functional>
#include <vector>

#include "layer/activation/cuda_silu.h"
#include "layer/matmul/gated.h"
#include "layer/matmul/kernels.h"
#include "tests/bench/matmul_timing.cuh"
#include "tests/unit/matmul_case.cuh"
#include "tests/unit/separate_calls.h"

namespace jax_ep::matmul {
namespace {

constexpr Model kModels[] = {{"K7168 N4096", 32, 7168, 4096},
                             {"K2048 N7168", 32, 2048, 7168},
                             {"K2048 N1536", 64, 2048, 1536},
                             {"K768 N2048", 64, 768, 2048},
                             {"K2048 N1536", 16, 2048, 1536}};
constexpr uint32_t kMeans[] = {16, 64, 128, 256, 512, 1024};
constexpr uint32_t kLargestMean = 1024;

// The codes of normal numbers of which the largest of 128 becomes 448, about.
__global__ void FillNormalCodes(uint8_t* codes, int64_t size, uint32_t seed) {
  for (int64_t i = ThreadIndex(); i < size; i += NumThreads()) {
    const float radius = sqrtf(-2 * logf(1 - Uniform(2 * i, seed)));
    codes[i] = ToE4m3(150 * radius * cospif(2 * Uniform(2 * i + 1, seed)));
  }
}

struct Operands {
  explicit Operands(const Model& model)
      : rows(NumRows(model) * model.k * 2),
        weights(model.n_groups * model.k * model.n * 2),
        row_codes(NumRows(model) * model.k),
        weight_codes(model.n_groups * model.k * model.n),
        row_scales(NumRows(model) * model.k / 128 * 4),
        weight_scales(model.n_groups * model.k / 128 * model.n / 128 * 4),
        hidden(NumRows(model) * model.n * 2),
        values(NumRows(model) * model.n / 2),
        scales(NumRows(model) * model.n / 256 * 4),
        workspace(MatmulWorkspaceBytes(model.n_groups)) {
    for (const Buffer* buffer : {&rows, &weights}) {
      FillNormal<<<kTestBlocks, kTestThreads>>>(buffer->As<__nv_bfloat16>(),
                                                static_cast<int64_t>(buffer->size() / 2), 1);
    }
    for (const Buffer* buffer : {&row_codes, &weight_codes}) {
      FillNormalCodes<<<kTestBlocks, kTestThreads>>>(buffer->As<uint8_t>(),
                                                     static_cast<int64_t>(buffer->size()), 1);
    }
    for (const Buffer* buffer : {&row_scales, &weight_scales}) {
      const auto size = static_cast<int64_t>(buffer->size() / 4);
      FillScales<<<kTestBlocks, kTestThreads>>>(buffer->As<float>(), size, 1, 1, 1);
    }
    ExpectSuccess("Fill", cudaDeviceSynchronize());
  }
  static int64_t NumRows(const Model& model) { return int64_t{model.n_groups} * kLargestMean; }

  MatmulCall Call(const Model& model, const Buffer& row_offsets, int64_t n_rows) const {
    MatmulCall call{};
    call.form = MatmulForm::kTransposedWeights;
    call.element = Element::kE4m3, call.out_type = RowType::kBFloat16;
    call.n_rows = n_rows, call.n_groups = model.n_groups, call.k = model.k, call.n = model.n;
    call.lhs = row_codes.As<void>(), call.rhs = weight_codes.As<void>();
    call.lhs_scales = row_scales.As<float>(), call.rhs_scales = weight_scales.As<float>();
    call.row_offsets = row_offsets.As<uint32_t>(), call.out = hidden.As<void>();
    call.workspace = workspace.As<void>(), call.workspace_bytes = workspace.size();
    return call;
  }
  MatmulCall BFloat16Call(const Model& model, const Buffer& row_offsets, int64_t n_rows) const {
    MatmulCall call = Call(model, row_offsets, n_rows);
    call.form = MatmulForm::kWeights, call.element = Element::kBFloat16;
    call.lhs = rows.As<void>(), call.rhs = weights.As<void>();
    call.lhs_scales = call.rhs_scales = nullptr;
    return call;
  }
  Gate GateOf() const {
    Gate gate{};
    gate.values = values.As<void>(), gate.scales = scales.As<float>();
    return gate;
  }

  const Buffer rows, weights, row_codes, weight_codes, row_scales, weight_scales, hidden, values,
      scales, workspace;
};

struct Sets {
  explicit Sets(const Model& model) : all{Operands(model), Operands(model)} {}

  const Operands all[kSets];
};

void TimeCase(const Model& model, const Sets& sets, uint32_t mean, bool is_drawn) {
  const std::vector<uint32_t> offsets = DrawOffsets(model.n_groups, mean, is_drawn);
  const Buffer row_offsets(offsets.size() * sizeof(uint32_t));
  ExpectSuccess("cudaMemcpy", cudaMemcpy(row_offsets.As<void>(), offsets.data(), row_offsets.size(),
                                         cudaMemcpyDefault));
  const auto call = [&](int i) { return sets.all[i].Call(model, row_offsets, offsets.back()); };
  const std::vector<std::function<void(int)>> launches = {
      [&](int i) {
        const MatmulCall of_set = sets.all[i].BFloat16Call(model, row_offsets, offsets.back());
        ExpectSuccess("bfloat16", hopper::LaunchBFloat16(of_set, kTimedStream));
      },
      [&](int i) {
        ExpectSuccess("CUTLASS", hopper::LaunchScaledByCutlass(call(i), kTimedStream));
      },
      [&](int i) { ExpectSuccess("scaled", hopper::LaunchScaled(call(i), kTimedStream)); },
      [&](int i) {
        ExpectSuccess("scaled", hopper::LaunchScaled(call(i), kTimedStream));
        const silu::SiluCall activation = ActivationOf(call(i), sets.all[i].GateOf());
        ExpectSuccess("fused_silu", silu::LaunchFusedSilu(activation, kTimedStream));
      },
      [&](int i) {
        ExpectSuccess("gated",
                      hopper::LaunchGatedScaled(call(i), sets.all[i].GateOf(), kTimedStream));
      }};
  const std::vector<double> ms = TimeRoundRobin(launches);
  std::printf(
      "{\"shape\": \"%s\", \"n_groups\": %u, \"mean\": %u, \"groups\": \"%s\", \"bfloat16_ms\": "
      "%.4f, \"cutlass_ms\": %.4f, \"chosen_ms\": %.4f, \"pair_ms\": %.4f, \"gated_ms\": %.4f}\n",
      model.name, model.n_groups, mean, is_drawn ? "random" : "equal", ms[0], ms[1], ms[2], ms[3],
      ms[4]);
  std::fflush(stdout);
}

}  // namespace
}  // namespace jax_ep::matmul

int main(int n_args, char** args) {
  using namespace jax_ep::matmul;
  ForEachCase<Sets>(kModels, kMeans, n_args, args, TimeCase);
}
