// Checks of the kernel with swapped operands where it is slower, too.
#pragma once

#include <chrono>
#include <cstdint>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "layer/matmul/kernels.h"
#include "tests/unit/matmul_case.cuh"

namespace jax_ep::matmul {

const std::vector<uint32_t> kEdges = {0, 1, 7, 8, 9, 17, 0, 127, 128, 129, 255, 256, 257, 0};

inline std::vector<uint32_t> Multinomial(uint32_t n_groups, uint32_t n_rows, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint32_t> sizes(n_groups);
  for (uint32_t i = 0; i < n_rows; ++i) ++sizes[random() % n_groups];
  return sizes;
}

inline std::vector<uint32_t> Zipf(uint32_t n_groups, uint32_t first) {
  std::vector<uint32_t> sizes;
  for (uint32_t i = 1; i <= n_groups; ++i) sizes.push_back(first / i);
  return sizes;
}

inline std::vector<uint32_t> EverySize() {
  std::vector<uint32_t> sizes;
  for (uint32_t size = 0; size <= 264; ++size) sizes.push_back(size);
  return sizes;
}

inline std::vector<Shape> SwappedShapes() {
  std::vector<Shape> shapes = {
      MakeShape("one row", {1}, 3, 8, 8),
      MakeShape("one unit", {8}, 0, 64, 128),
      MakeShape("one tile", {256}, 0, 256, 256),
      // Tiles of up to 96 rows and of up to 128, whose stages are smaller.
      MakeShape("few rows", {1, 96, 0, 8, 95, 88, 9, 64, 33}, 20, 840, 648),
      MakeShape("half of a tile's rows", {1, 128, 0, 97, 96, 120, 121, 9}, 20, 840, 648),
      MakeShape("few rows of many groups", Multinomial(64, 64 * 20, 3), 9, 776, 1544),
      MakeShape("edges", kEdges, 77, 264, 392),
      MakeShape("edges, one stage", kEdges, 5, 64, 264),
      MakeShape("edges, smallest k", kEdges, 5, 8, 264),
      MakeShape("edges, smallest n", kEdges, 5, 1032, 8),
      MakeShape("every size", EverySize(), 300, 136, 264),
      MakeShape("all groups empty", std::vector<uint32_t>(9), 130, 136, 264),
      MakeShape("multinomial", Multinomial(64, 64 * 150, 1), 99, 328, 776),
      MakeShape("zipf", Zipf(32, 6000), 1, 128, 520),
      MakeShape("as many groups as there may be", Multinomial(512, 5000, 2), 7, 72, 136),
      MakeShape("large, chosen by rows", {100, 131, 0, 140, 150}, 50, 4096, 8192),
      // On an H100, chosen if the weights are transposed.
      MakeShape("large, not chosen by rows", {128, 128}, 50, 8192, 8192),
  };
  Shape beyond = MakeShape("offsets beyond the rows", {40, 65, 0, 30, 100}, 0, 136, 72);
  beyond.n_rows = 100;
  beyond.row_offsets.back() = 4000000000;
  shapes.push_back(beyond);
  return shapes;
}

inline Shape DrawSwappedShape(uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint32_t> sizes(1 + random() % 40);
  for (uint32_t& size : sizes) {
    size = random() % 4 == 0 ? random() % 700 : kEdges[random() % kEdges.size()];
  }
  const int64_t k = 8 * (1 + random() % 80), n = 8 * (1 + random() % 80);
  return MakeShape("swapped, random " + std::to_string(seed), sizes, random() % 200, k, n);
}

template <hopper::Swap kSwap>
Backend SwapBackend(const char* name) {
  const auto launch = [](const MatmulCall& call, cudaStream_t stream) {
    return hopper::LaunchBFloat16(call, stream, kSwap);
  };
  return {name, launch, false};
}

// With the reference, and the bits of CUTLASS's kernels. Returns the number of cases.
inline int CheckSwapped(const Shape& shape, uint32_t seed) {
  const Backend cutlass = SwapBackend<hopper::Swap::kNever>("CUTLASS");
  int n_cases = 0;
  for (const Backend& backend : {SwapBackend<hopper::Swap::kByRows>("by rows"),
                                 SwapBackend<hopper::Swap::kSmallTiles>("swapped, 192"),
                                 SwapBackend<hopper::Swap::kLargeTiles>("swapped, 256")}) {
    for (const MatmulForm form : {MatmulForm::kWeights, MatmulForm::kTransposedWeights}) {
      for (const bool zeroes_unused : {false, true}) {
        const Variant variant = {form, Element::kBFloat16, RowType::kBFloat16, zeroes_unused};
        const std::string name = Describe(backend, shape, variant);
        DeviceCase device_case(shape, variant, seed);
        device_case.Run(backend, name);
        device_case.ExpectSameBits(cutlass, name);
        ++n_cases;
      }
    }
  }
  return n_cases;
}

// More groups than the table has room for.
inline void CheckTooManyGroups() {
  const Shape shape = MakeShape("too many groups", std::vector<uint32_t>(513, 1), 0, 72, 136);
  const Variant variant = {MatmulForm::kWeights, Element::kBFloat16, RowType::kBFloat16, false};
  DeviceCase device_case(shape, variant, 0);
  for (const Backend& backend : {SwapBackend<hopper::Swap::kSmallTiles>("swapped, 192"),
                                 SwapBackend<hopper::Swap::kLargeTiles>("swapped, 256")}) {
    device_case.ExpectError(backend, cudaErrorInvalidValue, Describe(backend, shape, variant));
  }
  device_case.Run(SwapBackend<hopper::Swap::kByRows>("by rows"), shape.name);
}

inline int TestSwapped(double seconds, uint32_t first_seed) {
  using Clock = std::chrono::steady_clock;
  int n_cases = 0;
  for (const Shape& shape : SwappedShapes()) n_cases += CheckSwapped(shape, 0);
  CheckTooManyGroups();
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  uint32_t seed = first_seed;
  for (; Clock::now() < end; ++seed) n_cases += CheckSwapped(DrawSwappedShape(seed), seed);
  std::cout << "swapped, random from seed " << first_seed << " to before " << seed << ": "
            << n_cases << " cases with the fixed ones" << std::endl;
  return n_cases;
}

}  // namespace jax_ep::matmul
