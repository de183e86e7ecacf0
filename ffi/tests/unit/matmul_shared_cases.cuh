// Checks of the kernels with swapped operands beside other kernels. Their clusters take tiles from
// a counter in the workspace.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

#include "layer/matmul/gated.h"
#include "layer/matmul/kernels.h"
#include "tests/unit/held_multiprocessors.cuh"
#include "tests/unit/matmul_case.cuh"
#include "tests/unit/matmul_gated_cases.cuh"
#include "tests/unit/matmul_gated_gradient_cases.cuh"
#include "tests/unit/matmul_swapped_cases.cuh"

namespace jax_ep::matmul {

constexpr uint64_t kHeldNanoseconds = 200'000;         // after which they are released
constexpr uint64_t kMostNanoseconds = 10'000'000'000;  // and end if they are not

inline unsigned HalfOfMultiprocessors() {
  int n = 0;
  ExpectSuccess("cudaDeviceGetAttribute",
                cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, 0));
  return static_cast<unsigned>(n) / 2;
}

// While another kernel holds half of the multiprocessors.
template <hopper::Swap kSwap>
cudaError_t LaunchBeside(const MatmulCall& call, cudaStream_t stream) {
  HeldMultiprocessors held;
  held.Hold(HalfOfMultiprocessors(), kMostNanoseconds, stream);
  const cudaError_t error = hopper::LaunchBFloat16(call, stream, kSwap);
  held.Release(kHeldNanoseconds);
  return error == cudaSuccess ? cudaDeviceSynchronize() : error;
}

// On two streams at the same time, and in a row on each, where calls have the same workspace, but
// results of their own: a call that does nothing leaves canaries.
template <hopper::Swap kSwap>
cudaError_t LaunchAtOnce(const MatmulCall& call, cudaStream_t) {
  const size_t n_bytes = call.out_elements() * 2;
  const Buffer outs[] = {Buffer(n_bytes), Buffer(n_bytes), Buffer(n_bytes),
                         Buffer(n_bytes), Buffer(n_bytes), Buffer(n_bytes)};
  const Buffer workspace(call.workspace_bytes);
  const HeldMultiprocessors a, b;  // for their streams
  const auto launch = [&](void* out, void* space, cudaStream_t stream, hopper::Swap swap) {
    MatmulCall one = call;
    one.out = out, one.workspace = space;
    ExpectSuccess("LaunchBFloat16", hopper::LaunchBFloat16(one, stream, swap));
  };
  ExpectSuccess("cudaDeviceSynchronize", cudaDeviceSynchronize());
  const Buffer* out = outs;
  for (const hopper::Swap swap : {hopper::Swap::kLargeTiles, hopper::Swap::kSmallTiles, kSwap}) {
    launch((out++)->As<void>(), call.workspace, a.stream(), swap);
    launch((out++)->As<void>(), workspace.As<void>(), b.stream(), swap);
  }
  launch(call.out, call.workspace, a.stream(), kSwap);
  ExpectSuccess("cudaDeviceSynchronize", cudaDeviceSynchronize());
  for (const Buffer& each : outs) {
    ExpectSameBytes("matmuls at once", each.As<uint8_t>(), static_cast<uint8_t*>(call.out),
                    n_bytes);
    ExpectSameBytes("past the end", each.guard(), nullptr, kGuardBytes);
  }
  ExpectSameBytes("past the end of the workspace", workspace.guard(), nullptr, kGuardBytes);
  return cudaSuccess;
}

// Before and after the gradient of weights, on one stream in one workspace, of which each call uses
// parts that others left behind.
template <hopper::Swap kSwap>
cudaError_t LaunchInTurn(const MatmulCall& call, cudaStream_t stream) {
  const size_t n_bytes = call.out_elements() * 2;
  const size_t n_weight_bytes = call.n_groups * call.k * call.n * 2;
  const Buffer first(n_bytes), gradient(n_weight_bytes), wanted(n_weight_bytes);
  const Buffer workspace(call.workspace_bytes);
  MatmulCall before = call, between = call;
  before.out = first.As<void>();
  between.form = MatmulForm::kRows;
  between.rhs = first.As<void>(), between.out = gradient.As<void>();
  cudaError_t error = hopper::LaunchBFloat16(before, stream, kSwap);
  if (error == cudaSuccess) error = hopper::LaunchWeightGradient(between, stream);
  if (error == cudaSuccess) error = hopper::LaunchBFloat16(call, stream, kSwap);
  ExpectSuccess("cudaDeviceSynchronize", cudaDeviceSynchronize());
  if (error != cudaSuccess) return error;
  between.out = wanted.As<void>(), between.workspace = workspace.As<void>();
  ExpectSuccess("LaunchWeightGradient", hopper::LaunchWeightGradient(between, stream));
  ExpectSameBytes("gradient between matmuls", gradient.As<uint8_t>(), wanted.As<uint8_t>(),
                  n_weight_bytes);
  ExpectSameBytes("matmul before a gradient", first.As<uint8_t>(), static_cast<uint8_t*>(call.out),
                  n_bytes);
  return cudaSuccess;
}

inline int CheckShared(const Shape& shape) {
  using hopper::Swap;
  const Backend backends[] = {
      {"swapped, 192, beside another kernel", LaunchBeside<Swap::kSmallTiles>, false},
      {"swapped, 256, beside another kernel", LaunchBeside<Swap::kLargeTiles>, false},
      {"swapped, 192, two at once", LaunchAtOnce<Swap::kSmallTiles>, false},
      {"swapped, 256, two at once", LaunchAtOnce<Swap::kLargeTiles>, false},
      {"swapped, 192, around a gradient", LaunchInTurn<Swap::kSmallTiles>, false},
      {"swapped, 256, around a gradient", LaunchInTurn<Swap::kLargeTiles>, false}};
  int n_cases = 0;
  for (const MatmulForm form : {MatmulForm::kWeights, MatmulForm::kTransposedWeights}) {
    const Variant variant = {form, Element::kBFloat16, RowType::kBFloat16, false};
    DeviceCase device_case(shape, variant, 0);
    for (const Backend& backend : backends) {
      const std::string name = Describe(backend, shape, variant);
      device_case.Run(backend, name);
      device_case.ExpectSameBits(SwapBackend<Swap::kNever>("CUTLASS"), name);
      ++n_cases;
    }
  }
  return n_cases;
}

inline int CheckGatedBeside(const Shape& shape) {
  const std::string name = "gated beside another kernel, " + shape.name;
  GatedCase gated_case(shape, 0);
  GatedGradientCase gradient_case(shape, 0);
  HeldMultiprocessors held;
  gated_case.Expect({}, name);
  gradient_case.Expect({}, name);
  const auto release = [&] { held.Release(kHeldNanoseconds); };
  for (const hopper::Swap swap : {hopper::Swap::kSmallTiles, hopper::Swap::kLargeTiles}) {
    held.Hold(HalfOfMultiprocessors(), kMostNanoseconds, nullptr);
    gated_case.Check({}, swap, name, release);
  }
  held.Hold(HalfOfMultiprocessors(), kMostNanoseconds, nullptr);
  gradient_case.Check({}, name, release);
  return 3;
}

// The small shapes end while the multiprocessors are held, the large one, which is left out under
// compute-sanitizer, later.
inline int TestShared(bool with_large) {
  std::vector<Shape> shapes = {
      MakeShape("one tile", {256}, 0, 256, 256), MakeShape("edges", kEdges, 77, 264, 392),
      MakeShape("multinomial", Multinomial(64, 64 * 150, 1), 99, 328, 776)};
  if (with_large) shapes.push_back(MakeShape("large", Multinomial(16, 4800, 4), 50, 2048, 4096));
  int n_cases = 0;
  for (const Shape& shape : shapes) {
    n_cases += CheckShared(shape) + CheckGatedBeside(WithGates(shape));
  }
  std::cout << "swapped, beside other kernels: " << n_cases << " cases" << std::endl;
  return n_cases;
}

}  // namespace jax_ep::matmul
