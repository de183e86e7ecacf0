// Times a matmul that does more than multiply beside the two calls that it stands for.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <iterator>
#include <vector>

#include "layer/matmul/kernels.h"
#include "layer/matmul/matmul_call.h"
#include "tests/bench/matmul_timing.cuh"
#include "tests/unit/matmul_case.cuh"

namespace jax_ep::matmul {

struct GatedModel {
  const char* name;
  uint32_t n_groups;
  int64_t hidden_size, expert_size;  // H, F
};

constexpr GatedModel kGatedModels[] = {{"DeepSeek-V3", 32, 7168, 2048},
                                       {"Qwen3-30B", 64, 2048, 768},
                                       {"Qwen3-30B", 16, 2048, 768},
                                       {"Mixtral", 4, 4096, 14336}};
constexpr uint32_t kGatedMeans[] = {16, 64, 128, 256, 512, 1024, 2048};

// What one of the two calls reads or writes, for as many rows as any case has.
struct GatedBuffers {
  explicit GatedBuffers(const GatedModel& model)
      : rows(NumRows(model) * model.hidden_size * 2),
        weights(model.n_groups * model.hidden_size * model.expert_size * 4),
        hidden(NumRows(model) * model.expert_size * 4),
        values(NumRows(model) * model.expert_size * 2),
        of_hidden(hidden.size()),
        workspace(MatmulWorkspaceBytes(model.n_groups)) {
    for (const Buffer* buffer : {&rows, &weights, &hidden}) {
      FillNormal<<<kTestBlocks, kTestThreads>>>(buffer->As<__nv_bfloat16>(),
                                                static_cast<int64_t>(buffer->size() / 2), 1);
    }
    ExpectSuccess("FillNormal", cudaDeviceSynchronize());
  }
  static int64_t NumRows(const GatedModel& model) {
    return int64_t{model.n_groups} * kGatedMeans[std::size(kGatedMeans) - 1];
  }

  // A call with the rows, [C, H], and the first n columns of the weights.
  MatmulCall Call(MatmulForm form, const GatedModel& model, int64_t n, const Buffer& out,
                  const Buffer& row_offsets, int64_t n_rows) const {
    MatmulCall call{};
    call.form = form, call.element = Element::kBFloat16, call.out_type = RowType::kBFloat16;
    call.n_rows = n_rows, call.n_groups = model.n_groups;
    call.k = model.hidden_size, call.n = n;
    call.lhs = rows.As<void>(), call.rhs = weights.As<void>(), call.out = out.As<void>();
    call.row_offsets = row_offsets.As<uint32_t>();
    call.workspace = workspace.As<void>(), call.workspace_bytes = workspace.size();
    return call;
  }

  const Buffer rows, weights, hidden, values, of_hidden, workspace;
};

// Work has, of its buffers: Call(...), the matmul; LaunchOther(call, buffers), what follows; and
// LaunchOne(call, buffers, swap), both in one call.
template <class Work>
void TimeGatedCase(const GatedModel& model, const std::vector<const GatedBuffers*>& sets,
                   uint32_t mean, bool is_drawn) {
  using hopper::Swap;
  const std::vector<uint32_t> offsets = DrawOffsets(model.n_groups, mean, is_drawn);
  const Buffer row_offsets(offsets.size() * sizeof(uint32_t));
  ExpectSuccess("cudaMemcpy", cudaMemcpy(row_offsets.As<void>(), offsets.data(), row_offsets.size(),
                                         cudaMemcpyDefault));
  const auto call = [&](int i) { return Work::Call(*sets[i], model, row_offsets, offsets.back()); };
  const auto multiply = [&](int i) {
    ExpectSuccess("matmul", hopper::LaunchBFloat16(call(i), kTimedStream));
  };
  const auto pair = [&](int i) {
    multiply(i);
    ExpectSuccess("other", Work::LaunchOther(call(i), *sets[i]));
  };
  std::vector<std::function<void(int)>> launches = {multiply, pair};
  for (const Swap swap : {Swap::kByRows, Swap::kSmallTiles, Swap::kLargeTiles}) {
    launches.push_back([&sets, &call, swap](int i) {
      ExpectSuccess("one", Work::LaunchOne(call(i), *sets[i], swap));
    });
  }
  const std::vector<double> ms = TimeRoundRobin(launches);
  std::printf(
      "{\"model\": \"%s\", \"n_groups\": %u, \"mean\": %u, \"groups\": \"%s\", \"matmul_ms\": "
      "%.4f, \"pair_ms\": %.4f, \"chosen_ms\": %.4f, \"tiles192_ms\": %.4f, "
      "\"tiles256_ms\": %.4f}\n",
      model.name, model.n_groups, mean, is_drawn ? "random" : "equal", ms[0], ms[1], ms[2], ms[3],
      ms[4]);
  std::fflush(stdout);
}

template <class Work>
void TimeGated() {
  for (const GatedModel& model : kGatedModels) {
    const GatedBuffers first(model), second(model);
    for (const bool is_drawn : {true, false}) {
      for (const uint32_t mean : kGatedMeans) {
        TimeGatedCase<Work>(model, {&first, &second}, mean, is_drawn);
      }
    }
  }
}

}  // namespace jax_ep::matmul
