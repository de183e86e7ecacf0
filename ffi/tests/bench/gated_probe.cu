// Times a matmul that also computes the activation (layer/matmul/gated.h) beside the two calls that
// it stands for: the matmul, with the kernel that is chosen, and fused_silu.
//
//   gated_probe

#include <cstdint>
#include <cstdio>
#include <functional>
#include <vector>

#include "layer/matmul/gated.h"
#include "layer/silu/cuda_silu.h"
#include "tests/bench/matmul_timing.cuh"
#include "tests/unit/matmul_case.cuh"

namespace jax_ep::matmul {
namespace {

struct Model {
  const char* name;
  uint32_t n_groups;
  int64_t k, n;  // n: 2 F
};

constexpr Model kModels[] = {{"DeepSeek-V3", 32, 7168, 4096},
                             {"Qwen3-30B", 64, 2048, 1536},
                             {"Qwen3-30B", 16, 2048, 1536},
                             {"Mixtral", 4, 4096, 28672}};
constexpr uint32_t kMeans[] = {16, 64, 128, 256, 512, 1024};

struct Set {
  explicit Set(const Model& model)
      : rows(NumRows(model) * model.k * 2),
        weights(model.n_groups * model.k * model.n * 2),
        hidden(NumRows(model) * model.n * 2),
        values(NumRows(model) * model.n),
        workspace(MatmulWorkspaceBytes(model.n_groups)) {
    for (const Buffer* buffer : {&rows, &weights}) {
      FillNormal<<<kTestBlocks, kTestThreads>>>(buffer->As<__nv_bfloat16>(),
                                                static_cast<int64_t>(buffer->size() / 2), 1);
    }
    ExpectSuccess("FillNormal", cudaDeviceSynchronize());
  }
  static int64_t NumRows(const Model& model) {
    return int64_t{model.n_groups} * kMeans[std::size(kMeans) - 1];
  }

  const Buffer rows, weights, hidden, values, workspace;
};

MatmulCall CallOf(const Model& model, const Set& set, const Buffer& row_offsets, int64_t n_rows) {
  MatmulCall call{};
  call.form = MatmulForm::kWeights, call.element = Element::kBFloat16;
  call.out_type = RowType::kBFloat16;
  call.n_rows = n_rows, call.n_groups = model.n_groups;
  call.k = model.k, call.n = model.n;
  call.lhs = set.rows.As<void>(), call.rhs = set.weights.As<void>();
  call.row_offsets = row_offsets.As<uint32_t>(), call.out = set.hidden.As<void>();
  call.workspace = set.workspace.As<void>(), call.workspace_bytes = set.workspace.size();
  return call;
}

void TimeCase(const Model& model, const std::vector<Set*>& sets, uint32_t mean, bool is_drawn) {
  using hopper::Swap;
  const std::vector<uint32_t> offsets = DrawOffsets(model.n_groups, mean, is_drawn);
  const Buffer row_offsets(offsets.size() * sizeof(uint32_t));
  ExpectSuccess("cudaMemcpy", cudaMemcpy(row_offsets.As<void>(), offsets.data(), row_offsets.size(),
                                         cudaMemcpyDefault));
  const auto call = [&](int i) { return CallOf(model, *sets[i], row_offsets, offsets.back()); };
  const auto gate = [&](int i) {
    return Gate{false, {false, 0.0f, 0.0f}, sets[i]->values.As<void>()};
  };
  const auto multiply = [&](int i) {
    ExpectSuccess("matmul", hopper::LaunchBFloat16(call(i), nullptr));
  };
  const auto pair = [&](int i) {
    multiply(i);
    ExpectSuccess("silu", silu::LaunchFusedSilu(ActivationOf(call(i), gate(i)), nullptr));
  };
  std::vector<std::function<void(int)>> launches = {multiply, pair};
  for (const Swap swap : {Swap::kByRows, Swap::kSmallTiles, Swap::kLargeTiles}) {
    launches.push_back([&call, &gate, swap](int i) {
      ExpectSuccess("gated", LaunchGated(call(i), gate(i), nullptr, swap));
    });
  }
  const std::vector<double> ms = TimeRoundRobin(launches);
  std::printf(
      "{\"model\": \"%s\", \"n_groups\": %u, \"mean\": %u, \"groups\": \"%s\", \"matmul_ms\": "
      "%.4f, "
      "\"pair_ms\": %.4f, \"chosen_ms\": %.4f, \"tiles192_ms\": %.4f, "
      "\"tiles256_ms\": %.4f}\n",
      model.name, model.n_groups, mean, is_drawn ? "random" : "equal", ms[0], ms[1], ms[2], ms[3],
      ms[4]);
  std::fflush(stdout);
}

void TimeGated() {
  for (const Model& model : kModels) {
    Set first(model), second(model);
    for (const bool is_drawn : {false, true}) {
      for (const uint32_t mean : kMeans) TimeCase(model, {&first, &second}, mean, is_drawn);
    }
  }
}

}  // namespace
}  // namespace jax_ep::matmul

int main() { jax_ep::matmul::TimeGated(); }
