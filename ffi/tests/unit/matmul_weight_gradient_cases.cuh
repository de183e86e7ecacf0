// Checks of the kernel for the gradients of weights.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

#include "layer/matmul/kernels.h"
#include "tests/unit/matmul_case.cuh"
#include "tests/unit/matmul_swapped_cases.cuh"

namespace jax_ep::matmul {

static __global__ void RoundSums(const float* sums, __nv_bfloat16* out, int64_t size) {
  for (int64_t i = ThreadIndex(); i < size; i += NumThreads())
    out[i] = __float2bfloat16_rn(sums[i]);
}

// By a kernel of CUTLASS, whose sums are float32.
inline cudaError_t LaunchRounded(const MatmulCall& call, cudaStream_t stream) {
  const Buffer sums(call.out_elements() * sizeof(float));
  MatmulCall exact = call;
  exact.out = sums.As<void>(), exact.out_type = RowType::kFloat32;
  cudaError_t error = hopper::LaunchBFloat16(exact, stream);
  if (error != cudaSuccess) return error;
  RoundSums<<<kTestBlocks, kTestThreads, 0, stream>>>(
      sums.As<float>(), static_cast<__nv_bfloat16*>(call.out), call.out_elements());
  error = cudaGetLastError();
  return error == cudaSuccess ? cudaStreamSynchronize(stream) : error;
}

static __global__ void AddSums(const MatmulCall call, const float* sums, int64_t size) {
  for (int64_t i = ThreadIndex(); i < size; i += NumThreads()) {
    const int64_t group = i / (call.k * call.n);
    if (ClampedOffset(call, group) == ClampedOffset(call, group + 1)) continue;
    static_cast<float*>(call.out)[i] += sums[i];
  }
}

// By a kernel of CUTLASS, whose sums another kernel adds.
inline cudaError_t LaunchThenAdd(const MatmulCall& call, cudaStream_t stream) {
  const Buffer sums(call.out_elements() * sizeof(float));
  MatmulCall product = call;
  product.out = sums.As<void>(), product.accumulates = false;
  cudaError_t error = LaunchHopperMatmul(product, stream);
  if (error != cudaSuccess) return error;
  AddSums<<<kTestBlocks, kTestThreads, 0, stream>>>(call, sums.As<float>(), call.out_elements());
  error = cudaGetLastError();
  return error == cudaSuccess ? cudaStreamSynchronize(stream) : error;
}

inline void CheckWeightGradient(const Shape& shape, uint32_t seed) {
  constexpr auto kForm = MatmulForm::kRows;
  const auto check = [&](const Variant& variant, const Backend& cutlass) {
    const Backend own = {"weight gradient", OnStream<hopper::LaunchWeightGradient>, false};
    const std::string name = Describe(own, shape, variant);
    DeviceCase device_case(shape, variant, seed);
    device_case.Run(own, name);
    device_case.ExpectSameBits(cutlass, name);
  };
  check({kForm, Element::kBFloat16, RowType::kBFloat16, false}, {"CUTLASS", LaunchRounded, false});
  for (const Element element : {Element::kBFloat16, Element::kFloat16}) {
    check({kForm, element, RowType::kFloat32, false, true},
          {"CUTLASS, then a sum", LaunchThenAdd, false});
  }
}

inline std::vector<Shape> WeightGradientShapes() {
  std::vector<Shape> shapes;
  for (const Shape& shape : SwappedShapes()) {  // without the large ones
    if (shape.n_groups() * shape.k * shape.n < 1 << 26) shapes.push_back(shape);
  }
  for (uint32_t size = 1; size <= 70; ++size) {  // rows that are not in use, NaN, follow
    shapes.push_back(MakeShape("rows up to NaN", {size}, 100, 264, 136));
  }
  shapes.push_back(MakeShape("bands of columns", {40, 0, 300}, 9, 520, 8456));
  shapes.push_back(MakeShape("many rows of the matrix", {33}, 0, 20008, 24));
  shapes.push_back(
      MakeShape("more groups than threads of a block", Multinomial(1500, 3000, 3), 7, 24, 40));
  return shapes;
}

inline int TestWeightGradient(double seconds, uint32_t first_seed) {
  using Clock = std::chrono::steady_clock;
  int n_cases = 0;
  for (const Shape& shape : WeightGradientShapes()) CheckWeightGradient(shape, 0), ++n_cases;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  uint32_t seed = first_seed;
  for (; Clock::now() < end; ++seed, ++n_cases) CheckWeightGradient(DrawSwappedShape(seed), seed);
  std::cout << "gradient of weights, random from seed " << first_seed << " to before " << seed
            << ": " << n_cases << " cases with the fixed ones" << std::endl;
  return n_cases;
}

}  // namespace jax_ep::matmul
