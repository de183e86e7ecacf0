// Checks of the matmul with scales (layer/matmul/hopper/hopper_scaled.cuh), against CUTLASS's, and
// of the same with the activation of its result.
#pragma once

#include <chrono>
#include <cstdint>
#include <iostream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "layer/activation/cuda_silu.h"
#include "layer/matmul/gated.h"
#include "layer/matmul/kernels.h"
#include "tests/unit/matmul_case.cuh"
#include "tests/unit/matmul_gated_cases.cuh"
#include "tests/unit/matmul_swapped_cases.cuh"
#include "tests/unit/separate_calls.h"

namespace jax_ep::matmul {

inline std::vector<Shape> ScaledShapes() {
  std::vector<Shape> shapes = {
      MakeShape("one row", {1}, 3, 128, 8),
      MakeShape("one tile", {256}, 0, 256, 256),
      MakeShape("few rows", {1, 96, 0, 8, 95, 88, 9, 64, 33}, 20, 896, 648),
      MakeShape("edges", kEdges, 77, 384, 392),
      MakeShape("edges, one stage", kEdges, 5, 128, 264),
      MakeShape("edges, smallest n", kEdges, 5, 1024, 8),
      MakeShape("every size", EverySize(), 300, 128, 512),
      MakeShape("all groups empty", std::vector<uint32_t>(9), 130, 256, 256),
      MakeShape("multinomial", Multinomial(64, 64 * 150, 1), 99, 384, 776),
      MakeShape("zipf", Zipf(32, 6000), 1, 128, 520),
      MakeShape("as many groups as there may be", Multinomial(512, 5000, 2), 7, 128, 136),
      MakeShape("long k", {65, 0, 129, 300}, 3, 7168, 272),
  };
  Shape beyond = MakeShape("offsets beyond the rows", {40, 65, 0, 30, 100}, 0, 256, 72);
  beyond.n_rows = 100;
  beyond.row_offsets.back() = 4000000000;
  shapes.push_back(beyond);
  return shapes;
}

inline Shape DrawScaledShape(uint32_t seed) {
  Shape shape = DrawSwappedShape(seed);
  shape.name = "scaled, random " + std::to_string(seed);
  shape.k = 128 * (1 + shape.k / 128);
  return shape;
}

static __global__ void Multiply(float* values, int64_t size, float factor) {
  for (int64_t i = ThreadIndex(); i < size; i += NumThreads()) values[i] *= factor;
}

// With the reference, and the bits of CUTLASS's kernels. Returns the number of cases.
inline int CheckScaled(const Shape& shape, uint32_t seed) {
  const Backend cutlass = {"CUTLASS", OnStream<hopper::LaunchScaledByCutlass>, true};
  const Backend scaled = {"scaled", OnStream<hopper::LaunchScaled>, true};
  int n_cases = 0;
  for (const bool zeroes_unused : {false, true}) {
    const Variant variant = {MatmulForm::kTransposedWeights, Element::kE4m3, RowType::kBFloat16,
                             zeroes_unused};
    const std::string name = Describe(scaled, shape, variant);
    DeviceCase device_case(shape, variant, seed);
    device_case.Run(scaled, name);
    device_case.ExpectSameBits(cutlass, name);
    ++n_cases;
  }
  return n_cases;
}

// `shape.n` is 2 F, a multiple of 256. Rows that are not in use are NaN, and their codes and scales
// must stay as they are.
class GatedScaledCase {
 public:
  // `row_scale`: about the scales of rows, which make the results large or small.
  GatedScaledCase(const Shape& shape, float row_scale, uint32_t seed)
      : lhs_(shape.n_rows * shape.k),
        rhs_(shape.n_groups() * shape.k * shape.n),
        bias_(shape.n_groups() * shape.n * 2),
        row_offsets_(shape.row_offsets.size() * sizeof(uint32_t)),
        lhs_scales_(shape.k / 128 * shape.n_rows * sizeof(float)),
        rhs_scales_(shape.n_groups() * (shape.n / 128) * (shape.k / 128) * sizeof(float)),
        hidden_(shape.n_rows * shape.n * 2),
        wanted_(shape.n_rows * shape.n / 2),
        got_(wanted_.size()),
        wanted_scales_(shape.n / 256 * shape.n_rows * sizeof(float)),
        got_scales_(wanted_scales_.size()),
        workspace_(MatmulWorkspaceBytes(shape.n_groups())) {
    call_.form = MatmulForm::kTransposedWeights, call_.element = Element::kE4m3;
    call_.out_type = RowType::kBFloat16;
    call_.n_rows = shape.n_rows, call_.n_groups = shape.n_groups();
    call_.k = shape.k, call_.n = shape.n;
    call_.lhs = lhs_.As<void>(), call_.rhs = rhs_.As<void>(), call_.out = hidden_.As<void>();
    call_.row_offsets = row_offsets_.As<uint32_t>();
    call_.lhs_scales = lhs_scales_.As<float>(), call_.rhs_scales = rhs_scales_.As<float>();
    call_.workspace = workspace_.As<void>(), call_.workspace_bytes = workspace_.size();
    const auto n_weights = static_cast<int64_t>(rhs_.size());
    const int64_t n_used = shape.n_used();
    FillElements<<<kTestBlocks, kTestThreads>>>(lhs_.As<void>(), call_.element,
                                                call_.n_rows * call_.k, n_used * call_.k, seed);
    FillElements<<<kTestBlocks, kTestThreads>>>(rhs_.As<void>(), call_.element, n_weights,
                                                n_weights, seed + 1);
    const int64_t n_biases = call_.n_groups * call_.n;
    FillElements<<<kTestBlocks, kTestThreads>>>(bias_.As<void>(), Element::kBFloat16, n_biases,
                                                n_biases, seed + 4);
    const auto fill = [&](const Buffer& scales, int64_t n_columns, int64_t n_of_used, float scale,
                          uint32_t of_seed) {
      const auto size = static_cast<int64_t>(scales.size() / sizeof(float));
      FillScales<<<kTestBlocks, kTestThreads>>>(scales.As<float>(), size, n_columns, n_of_used,
                                                of_seed);
      Multiply<<<kTestBlocks, kTestThreads>>>(scales.As<float>(), size, scale);
    };
    fill(lhs_scales_, call_.n_rows, n_used, row_scale * 100, seed + 2);
    fill(rhs_scales_, 1, 1, 0.01f, seed + 3);
    ExpectSuccess("cudaMemcpy", cudaMemcpy(row_offsets_.As<void>(), shape.row_offsets.data(),
                                           row_offsets_.size(), cudaMemcpyHostToDevice));
  }

  // Separate calls: a matmul by CUTLASS, the addition of a bias, if there is one, and fused_silu.
  void Expect(Gate gate, const std::string& name) {
    Run(wanted_, wanted_scales_, gate, name, [&] {
      const cudaError_t error = hopper::LaunchScaledByCutlass(call_, nullptr);
      if (error != cudaSuccess) return error;
      if (gate.bias != nullptr) AddBias<<<kTestBlocks, kTestThreads>>>(call_, gate.bias);
      return silu::LaunchFusedSilu(ActivationOf(call_, gate), nullptr);
    });
  }

  // After Expect, of the same gate.
  void Check(Gate gate, const std::string& name) {
    Run(got_, got_scales_, gate, name,
        [&] { return hopper::LaunchGatedScaled(call_, gate, nullptr); });
    CheckAgain(name);
    ExpectSameBytes(name + ": hidden", hidden_.As<uint8_t>(), nullptr, hidden_.size());
    for (const Buffer* buffer : {&got_, &got_scales_, &hidden_, &workspace_}) {
      ExpectSameBytes(name + ": past the end", buffer->guard(), nullptr, kGuardBytes);
    }
  }

  // Launches into what the last Check has compared, and does not wait.
  void LaunchAgain(Gate gate) {
    gate.values = got_.As<void>(), gate.scales = got_scales_.As<float>();
    ExpectSuccess("again", hopper::LaunchGatedScaled(call_, gate, nullptr));
  }
  void CheckAgain(const std::string& name) {
    ExpectSameBytes(name + ": scales", got_scales_.As<uint8_t>(), wanted_scales_.As<uint8_t>(),
                    got_scales_.size());
    ExpectSameBytes(name + ": codes", got_.As<uint8_t>(), wanted_.As<uint8_t>(), got_.size());
  }

  const void* bias() const { return bias_.As<void>(); }

 private:
  template <class LaunchCall>
  void Run(const Buffer& codes, const Buffer& scales, Gate& gate, const std::string& name,
           const LaunchCall& launch) {
    gate.values = codes.As<void>(), gate.scales = scales.As<float>();
    for (const Buffer* buffer : {&codes, &scales, &hidden_}) {
      ExpectSuccess(name, cudaMemset(buffer->As<void>(), kCanary, buffer->size()));
    }
    ExpectSuccess(name, launch());
    ExpectSuccess(name, cudaDeviceSynchronize());
  }

  MatmulCall call_{};
  const Buffer lhs_, rhs_, bias_, row_offsets_, lhs_scales_, rhs_scales_, hidden_, wanted_, got_,
      wanted_scales_, got_scales_, workspace_;
};

// Returns the number of cases.
inline int CheckGatedScaled(Shape shape, uint32_t seed) {
  if (shape.n_rows == 0) return 0;  // no kernel is needed
  shape.n = (shape.n + 255) / 256 * 256;
  int n_cases = 0;
  // Usual values, some that become zero, and some with infinities and NaN.
  for (const float row_scale : {0.001f, 1e-9f, 1e30f}) {
    GatedScaledCase gated_case(shape, row_scale, seed);
    for (const bool is_interleaved : {false, true}) {
      for (const bool has_bias : {false, true}) {
        Gate gate{};
        gate.is_interleaved = is_interleaved;
        gate.activation = {(seed + is_interleaved + has_bias) % 2 == 1, 1.702f, 2.0f};
        gate.bias = has_bias ? gated_case.bias() : nullptr;
        std::ostringstream name;
        name << "gated scaled, " << shape.name << ", k " << shape.k << ", n " << shape.n
             << ", scale " << row_scale << (is_interleaved ? ", interleaved" : "")
             << (gate.activation.is_clamped ? ", clamped" : "") << (has_bias ? ", biases" : "");
        gated_case.Expect(gate, name.str());
        gated_case.Check(gate, name.str());
        ++n_cases;
      }
    }
  }
  return n_cases;
}

// Kernels that start before the one ahead of them has ended, with tiles of many and of few rows.
inline int CheckChain() {
  GatedScaledCase large(MakeShape("", Multinomial(16, 16 * 700, 4), 5, 128, 1024), 0.001f, 1);
  GatedScaledCase small(MakeShape("", Multinomial(64, 64 * 40, 5), 5, 128, 512), 0.001f, 2);
  const Gate gate{};
  for (GatedScaledCase* const one : {&large, &small}) {
    one->Expect(gate, "gated scaled, before a chain");
    one->Check(gate, "gated scaled, before a chain");
  }
  for (int i = 0; i < 50; ++i) large.LaunchAgain(gate), small.LaunchAgain(gate);
  ExpectSuccess("a chain", cudaDeviceSynchronize());
  large.CheckAgain("gated scaled, a chain");
  small.CheckAgain("gated scaled, a chain");
  return 2;
}

// CUTLASS multiplies where there is no room for so many groups.
inline int CheckManyScaledGroups() {
  const Shape shape = MakeShape("many groups", std::vector<uint32_t>(513, 3), 9, 128, 136);
  const Backend scaled = {"scaled", OnStream<LaunchHopperMatmul>, true};
  const Variant variant = {MatmulForm::kTransposedWeights, Element::kE4m3, RowType::kBFloat16,
                           false};
  DeviceCase(shape, variant, 0).Run(scaled, Describe(scaled, shape, variant));
  return 1;
}

inline int TestScaled(double seconds, uint32_t first_seed) {
  using Clock = std::chrono::steady_clock;
  int n_cases = CheckChain() + CheckManyScaledGroups();
  for (const Shape& shape : ScaledShapes()) {
    n_cases += CheckScaled(shape, 0) + CheckGatedScaled(shape, 0);
  }
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  uint32_t seed = first_seed;
  for (; Clock::now() < end; ++seed) {
    const Shape shape = DrawScaledShape(seed);
    n_cases += CheckScaled(shape, seed) + CheckGatedScaled(shape, seed);
  }
  std::cout << "scaled, random from seed " << first_seed << " to before " << seed << ": " << n_cases
            << " cases with the fixed ones" << std::endl;
  return n_cases;
}

}  // namespace jax_ep::matmul
