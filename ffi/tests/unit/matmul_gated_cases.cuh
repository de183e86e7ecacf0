// Checks of the matmul that also computes the activation, against the two calls that it stands for.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "layer/activation/cuda_silu.h"
#include "layer/matmul/gated.h"
#include "layer/matmul/kernels.h"
#include "tests/unit/matmul_case.cuh"
#include "tests/unit/matmul_swapped_cases.cuh"
#include "tests/unit/separate_calls.h"

namespace jax_ep::matmul {

// Adds each group's bias to its rows of a result in bfloat16, rounding once.
static __global__ void AddBias(const MatmulCall call, const void* bias) {
  const int64_t size = ClampedOffset(call, call.n_groups) * call.n;
  for (int64_t i = ThreadIndex(); i < size; i += NumThreads()) {
    int64_t group = 0;
    while (i / call.n >= ClampedOffset(call, group + 1)) ++group;
    auto* const out = static_cast<__nv_bfloat16*>(call.out) + i;
    const auto* const added = static_cast<const __nv_bfloat16*>(bias) + group * call.n + i % call.n;
    *out = __float2bfloat16_rn(__bfloat162float(*out) + __bfloat162float(*added));
  }
}

// Separate calls: a matmul by CUTLASS, the addition of a bias, if there is one, and fused_silu.
inline cudaError_t LaunchSeparate(const MatmulCall& call, const Gate& gate, cudaStream_t stream) {
  const cudaError_t error = hopper::LaunchBFloat16(call, stream, hopper::Swap::kNever);
  if (error != cudaSuccess) return error;
  if (gate.bias != nullptr) AddBias<<<kTestBlocks, kTestThreads, 0, stream>>>(call, gate.bias);
  return silu::LaunchFusedSilu(ActivationOf(call, gate), stream);
}

// `shape.n` is 2 F. Rows that are not in use are NaN, and their values must stay as they are.
class GatedCase {
 public:
  GatedCase(const Shape& shape, uint32_t seed)
      : lhs_(shape.n_rows * shape.k * 2),
        rhs_(shape.n_groups() * shape.k * shape.n * 2),
        bias_(shape.n_groups() * shape.n * 2),
        row_offsets_(shape.row_offsets.size() * sizeof(uint32_t)),
        wanted_hidden_(shape.n_rows * shape.n * 2),
        got_hidden_(wanted_hidden_.size()),
        wanted_(shape.n_rows * shape.n),
        got_(shape.n_rows * shape.n),
        workspace_(MatmulWorkspaceBytes(shape.n_groups())) {
    call_.form = MatmulForm::kWeights, call_.element = Element::kBFloat16;
    call_.out_type = RowType::kBFloat16;
    call_.n_rows = shape.n_rows, call_.n_groups = shape.n_groups();
    call_.k = shape.k, call_.n = shape.n;
    call_.lhs = lhs_.As<void>(), call_.rhs = rhs_.As<void>();
    call_.row_offsets = row_offsets_.As<uint32_t>();
    call_.workspace = workspace_.As<void>(), call_.workspace_bytes = workspace_.size();
    const int64_t n_weights = call_.n_groups * call_.k * call_.n;
    FillElements<<<kTestBlocks, kTestThreads>>>(
        lhs_.As<void>(), call_.element, call_.n_rows * call_.k, shape.n_used() * call_.k, seed);
    FillElements<<<kTestBlocks, kTestThreads>>>(rhs_.As<void>(), call_.element, n_weights,
                                                n_weights, seed + 1);
    const int64_t n_biases = call_.n_groups * call_.n;
    FillElements<<<kTestBlocks, kTestThreads>>>(bias_.As<void>(), call_.element, n_biases, n_biases,
                                                seed + 2);
    ExpectSuccess("cudaMemcpy", cudaMemcpy(row_offsets_.As<void>(), shape.row_offsets.data(),
                                           row_offsets_.size(), cudaMemcpyHostToDevice));
  }

  void Expect(Gate gate, const std::string& name) {
    Run(wanted_, wanted_hidden_, gate, name, [&] { return LaunchSeparate(call_, gate, nullptr); });
  }

  // After Expect, of the same gate. `release` is called when all is launched.
  void Check(
      Gate gate, hopper::Swap swap, const std::string& name,
      const std::function<void()>& release = [] {}) {
    Run(got_, got_hidden_, gate, name, [&] {
      if (!gate.keeps_hidden) call_.out = nullptr;
      const cudaError_t error = hopper::LaunchGated(call_, gate, nullptr, swap);
      release();
      return error;
    });
    ExpectSameBytes(name + ": values", got_.As<uint8_t>(), wanted_.As<uint8_t>(), got_.size());
    if (gate.keeps_hidden) {
      ExpectSameBytes(name + ": hidden", got_hidden_.As<uint8_t>(), wanted_hidden_.As<uint8_t>(),
                      got_hidden_.size());
    }
    for (const Buffer* buffer : {&got_, &got_hidden_, &workspace_}) {
      ExpectSameBytes(name + ": past the end", buffer->guard(), nullptr, kGuardBytes);
    }
  }

  const void* bias() const { return bias_.As<void>(); }

 private:
  template <class LaunchCall>
  void Run(const Buffer& values, const Buffer& hidden, Gate& gate, const std::string& name,
           const LaunchCall& launch) {
    gate.values = values.As<void>(), call_.out = hidden.As<void>();
    for (const Buffer* buffer : {&values, &hidden}) {
      ExpectSuccess(name, cudaMemset(buffer->As<void>(), kCanary, buffer->size()));
    }
    ExpectSuccess(name, launch());
    ExpectSuccess(name, cudaDeviceSynchronize());
  }

  MatmulCall call_{};
  const Buffer lhs_, rhs_, bias_, row_offsets_, wanted_hidden_, got_hidden_, wanted_, got_,
      workspace_;
};

// Each function returns the number of cases.
inline int CheckGate(GatedCase& gated_case, Gate gate, const std::string& name) {
  using Swap = hopper::Swap;
  gated_case.Expect(gate, name);
  gated_case.Check(gate, Swap::kByRows, name + ", by rows");
  gated_case.Check(gate, Swap::kSmallTiles, name + ", 192");
  gated_case.Check(gate, Swap::kLargeTiles, name + ", 256");
  gate.keeps_hidden = true;
  gated_case.Check(gate, Swap::kByRows, name + ", with hidden rows, by rows");
  gated_case.Check(gate, Swap::kSmallTiles, name + ", with hidden rows, 192");
  gated_case.Check(gate, Swap::kLargeTiles, name + ", with hidden rows, 256");
  return 6;
}

inline int CheckGated(const Shape& shape, uint32_t seed) {
  if (shape.n_rows == 0) return 0;  // no kernel is needed
  GatedCase gated_case(shape, seed);
  int n_cases = 0;
  for (const bool is_interleaved : {false, true}) {
    for (const bool is_clamped : {false, true}) {
      Gate gate{};
      gate.is_interleaved = is_interleaved;
      gate.activation = {is_clamped, 1.702f, 2.0f};
      const std::string name = "gated, " + shape.name + ", k " + std::to_string(shape.k) + ", n " +
                               std::to_string(shape.n) + (is_interleaved ? ", interleaved" : "") +
                               (is_clamped ? ", clamped" : "");
      n_cases += CheckGate(gated_case, gate, name);
      gate.bias = gated_case.bias();
      n_cases += CheckGate(gated_case, gate, name + ", with a bias");
    }
  }
  return n_cases;
}

// Calls with columns for gates and ups.
inline Shape WithGates(Shape shape) {
  shape.n = (shape.n + 15) / 16 * 16;
  return shape;
}

inline int TestGated(double seconds, uint32_t first_seed) {
  using Clock = std::chrono::steady_clock;
  int n_cases = 0;
  for (const Shape& shape : SwappedShapes()) n_cases += CheckGated(WithGates(shape), 0);
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  uint32_t seed = first_seed;
  for (; Clock::now() < end; ++seed) n_cases += CheckGated(WithGates(DrawSwappedShape(seed)), seed);
  std::cout << "gated, random from seed " << first_seed << " to before " << seed << ": " << n_cases
            << " cases with the fixed ones" << std::endl;
  return n_cases;
}

}  // namespace jax_ep::matmul
