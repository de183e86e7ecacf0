// Checks of the gradient of rows with that of the activation before them, against the two calls
// that it stands for, and of the second of these against the host.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "core/float_types.h"
#include "layer/activation/cuda_silu.h"
#include "layer/matmul/gated.h"
#include "layer/matmul/kernels.h"
#include "tests/unit/matmul_case.cuh"
#include "tests/unit/matmul_swapped_cases.cuh"
#include "tests/unit/separate_calls.h"

namespace jax_ep::matmul {

// Two calls: a matmul by CUTLASS, and the gradient of fused_silu.
inline cudaError_t LaunchPair(const MatmulCall& call, const GatedGradient& gradient) {
  const cudaError_t error = hopper::LaunchBFloat16(call, nullptr, hopper::Swap::kNever);
  if (error != cudaSuccess) return error;
  return silu::LaunchSiluGradient(ActivationGradientOf(call, gradient), nullptr);
}

// `shape.n` is F. Rows that are not in use are NaN; their gradients are unspecified.
class GatedGradientCase {
 public:
  GatedGradientCase(const Shape& shape, uint32_t seed)
      : n_used_(shape.n_used()),
        lhs_(shape.n_rows * shape.k * 2),
        rhs_(shape.n_groups() * shape.k * shape.n * 2),
        row_offsets_(shape.row_offsets.size() * sizeof(uint32_t)),
        hidden_(shape.n_rows * shape.n * 4),
        of_values_(shape.n_rows * shape.n * 2),
        wanted_(hidden_.size()),
        got_(hidden_.size()),
        workspace_(MatmulWorkspaceBytes(shape.n_groups())) {
    call_.form = MatmulForm::kTransposedWeights, call_.element = Element::kBFloat16;
    call_.out_type = RowType::kBFloat16;
    call_.n_rows = shape.n_rows, call_.n_groups = shape.n_groups();
    call_.k = shape.k, call_.n = shape.n;
    call_.lhs = lhs_.As<void>(), call_.rhs = rhs_.As<void>(), call_.out = of_values_.As<void>();
    call_.row_offsets = row_offsets_.As<uint32_t>();
    call_.workspace = workspace_.As<void>(), call_.workspace_bytes = workspace_.size();
    const auto fill = [&](const Buffer& buffer, int64_t n_columns, int64_t n_used, uint32_t seed) {
      FillElements<<<kTestBlocks, kTestThreads>>>(buffer.As<void>(), Element::kBFloat16,
                                                  static_cast<int64_t>(buffer.size() / 2),
                                                  n_used * n_columns, seed);
    };
    fill(lhs_, call_.k, n_used_, seed);
    fill(rhs_, call_.k * call_.n, call_.n_groups, seed + 1);
    fill(hidden_, 2 * call_.n, n_used_, seed + 2);
    ExpectSuccess("cudaMemcpy", cudaMemcpy(row_offsets_.As<void>(), shape.row_offsets.data(),
                                           row_offsets_.size(), cudaMemcpyHostToDevice));
  }

  void Expect(GatedGradient gradient, const std::string& name) {
    Run(wanted_, gradient, name, [&] { return LaunchPair(call_, gradient); });
    const size_t used = UsedBytes();
    const std::vector<uint8_t> zeros(wanted_.size() - used);
    std::vector<uint8_t> unused(zeros.size());
    ExpectSuccess(name, cudaMemcpy(unused.data(), wanted_.As<uint8_t>() + used, unused.size(),
                                   cudaMemcpyDefault));
    CHECK_EQ(unused == zeros, true);
  }

  // After Expect, of the same gradient. `release` is called when all is launched.
  void Check(
      GatedGradient gradient, const std::string& name,
      const std::function<void()>& release = [] {}) {
    Run(got_, gradient, name, [&] {
      call_.out = nullptr;
      const cudaError_t error = hopper::LaunchGatedGradient(call_, gradient, nullptr);
      release();
      return error;
    });
    ExpectSameBytes(name + ": gradient", got_.As<uint8_t>(), wanted_.As<uint8_t>(), UsedBytes());
    for (const Buffer* buffer : {&got_, &of_values_, &workspace_}) {
      ExpectSameBytes(name + ": past the end", buffer->guard(), nullptr, kGuardBytes);
    }
  }

  // After Expect: the bits of the activation's gradient are those that the host computes.
  void CheckOnHost(const GatedGradient& gradient, const std::string& name) const {
    const auto hidden = ToHost(hidden_), of_values = ToHost(of_values_), wanted = ToHost(wanted_);
    const int64_t n = call_.n, stride = gradient.is_interleaved ? 2 : 1;
    int n_different = 0;
    const auto compare = [&](int64_t at, float exact) {
      n_different += wanted[at].bits != FromFloat<BFloat16>(exact).bits;
    };
    for (int64_t i = 0; i < n_used_ * n; ++i) {
      const int64_t gate = i / n * 2 * n + i % n * stride;
      const int64_t up = gate + (gradient.is_interleaved ? 1 : n);
      const silu::GateGradients exact = gradient.activation.Gradients(
          ToFloat(hidden[gate]), ToFloat(hidden[up]), ToFloat(of_values[i]));
      compare(gate, exact.gate), compare(up, exact.up);
    }
    CHECK_EQ(name + ": " + std::to_string(n_different) + " differ", name + ": 0 differ");
  }

 private:
  template <class LaunchCall>
  void Run(const Buffer& of_hidden, GatedGradient& gradient, const std::string& name,
           const LaunchCall& launch) {
    gradient.hidden = hidden_.As<void>(), gradient.of_hidden = of_hidden.As<void>();
    call_.out = of_values_.As<void>();
    ExpectSuccess(name, cudaMemset(gradient.of_hidden, kCanary, of_hidden.size()));
    ExpectSuccess(name, cudaMemset(of_values_.As<void>(), kCanary, of_values_.size()));
    ExpectSuccess(name, launch());
    ExpectSuccess(name, cudaDeviceSynchronize());
  }

  size_t UsedBytes() const { return n_used_ * call_.n * 4; }

  static std::vector<BFloat16> ToHost(const Buffer& buffer) {
    std::vector<BFloat16> host(buffer.size() / 2);
    ExpectSuccess("cudaMemcpy",
                  cudaMemcpy(host.data(), buffer.As<void>(), buffer.size(), cudaMemcpyDefault));
    return host;
  }

  MatmulCall call_{};
  const int64_t n_used_;
  const Buffer lhs_, rhs_, row_offsets_, hidden_, of_values_, wanted_, got_, workspace_;
};

// Returns the number of cases.
inline int CheckGatedGradient(const Shape& shape, uint32_t seed) {
  if (shape.n_rows == 0) return 0;  // no kernel is needed
  GatedGradientCase gradient_case(shape, seed);
  int n_cases = 0;
  for (const bool is_interleaved : {false, true}) {
    for (const bool is_clamped : {false, true}) {
      const GatedGradient gradient = {is_interleaved, {is_clamped, 1.702f, 0.5f}, nullptr, nullptr};
      const std::string name = "gated gradient, " + shape.name + ", k " + std::to_string(shape.k) +
                               ", n " + std::to_string(shape.n) +
                               (is_interleaved ? ", interleaved" : "") +
                               (is_clamped ? ", clamped" : "");
      gradient_case.Expect(gradient, name);
      if (shape.n_rows * shape.n < 1 << 16) gradient_case.CheckOnHost(gradient, name);
      gradient_case.Check(gradient, name);
      ++n_cases;
    }
  }
  return n_cases;
}

inline int TestGatedGradient(double seconds, uint32_t first_seed) {
  using Clock = std::chrono::steady_clock;
  int n_cases = 0;
  for (const Shape& shape : SwappedShapes()) n_cases += CheckGatedGradient(shape, 0);
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  uint32_t seed = first_seed;
  for (; Clock::now() < end; ++seed) n_cases += CheckGatedGradient(DrawSwappedShape(seed), seed);
  std::cout << "gated gradient, random from seed " << first_seed << " to before " << seed << ": "
            << n_cases << " cases with the fixed ones" << std::endl;
  return n_cases;
}

}  // namespace jax_ep::matmul
