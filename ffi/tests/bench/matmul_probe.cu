// Checks the grouped matmul with swapped operands (tests/swapped/hopper_swapped.h) against the
// reference, then times it beside the kernels in use.
//
//   matmul_probe [seconds of random cases] [folder of libcublas] [seed]

#include <cuda_runtime_api.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "tests/bench/matmul_probe.h"
#include "tests/swapped/hopper_swapped.h"
#include "tests/unit/matmul_case.cuh"

namespace jax_ep::matmul {
namespace {

MatmulTimeout* timeout = nullptr;  // in host memory that the device can write to

void ReportTimeout(int) {
  if (timeout == nullptr || timeout->is_set == 0) return;
  std::fprintf(stderr, "a wait did not end: block %u, thread %u, barrier %#x, parity %u\n",
               timeout->block, timeout->thread, timeout->barrier, timeout->parity);
}

const std::vector<uint32_t> kEdges = {0, 1, 7, 8, 9, 17, 0, 127, 128, 129, 255, 256, 257, 0};

std::vector<uint32_t> Multinomial(uint32_t n_groups, uint32_t n_rows, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint32_t> sizes(n_groups);
  for (uint32_t i = 0; i < n_rows; ++i) ++sizes[random() % n_groups];
  return sizes;
}

std::vector<uint32_t> Zipf(uint32_t n_groups, uint32_t first) {
  std::vector<uint32_t> sizes;
  for (uint32_t i = 1; i <= n_groups; ++i) sizes.push_back(first / i);
  return sizes;
}

std::vector<uint32_t> EverySize() {
  std::vector<uint32_t> sizes;
  for (uint32_t size = 0; size <= 264; ++size) sizes.push_back(size);
  return sizes;
}

std::vector<Shape> Shapes() {
  std::vector<Shape> shapes = {
      MakeShape("one row", {1}, 3, 8, 8),
      MakeShape("one unit", {8}, 0, 64, 128),
      MakeShape("one tile", {256}, 0, 256, 256),
      MakeShape("edges", kEdges, 77, 264, 392),
      MakeShape("edges, one stage", kEdges, 5, 64, 264),
      MakeShape("edges, smallest k", kEdges, 5, 8, 264),
      MakeShape("edges, smallest n", kEdges, 5, 1032, 8),
      MakeShape("every size", EverySize(), 300, 136, 264),
      MakeShape("all groups empty", std::vector<uint32_t>(9), 130, 136, 264),
      MakeShape("multinomial", Multinomial(64, 64 * 150, 1), 99, 328, 776),
      MakeShape("zipf", Zipf(32, 6000), 1, 128, 520),
      MakeShape("more groups than are sorted", Multinomial(600, 5000, 2), 7, 72, 136),
      MakeShape("no rows", {0, 0, 0}, 0, 72, 136),
      MakeShape("no columns", {5, 70}, 4, 72, 0),
      MakeShape("no terms", {5, 0, 70}, 4, 0, 136),
  };
  Shape beyond = MakeShape("offsets beyond the rows", {40, 65, 0, 30, 100}, 0, 136, 72);
  beyond.n_rows = 100;
  beyond.row_offsets.back() = 4000000000;
  shapes.push_back(beyond);
  return shapes;
}

void Check(const Shape& shape, uint32_t seed) {
  for (const ProbedVariant& probed : kProbedVariants) {
    static SwappedVariant swapped;  // what the function without captures launches
    swapped = probed.variant;
    const Backend backend = {
        probed.name,
        [](const MatmulCall& call, cudaStream_t) { return LaunchProbedMatmul(call, swapped); },
        false};
    for (const bool zeroes_unused : {false, true}) {
      const Variant variant = {MatmulForm::kWeights, Element::kBFloat16, RowType::kBFloat16,
                               zeroes_unused};
      DeviceCase(shape, variant, seed).Run(backend, Describe(backend, shape, variant));
    }
  }
}

Shape DrawShape(uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint32_t> sizes(1 + random() % 40);
  for (uint32_t& size : sizes) {
    size = random() % 4 == 0 ? random() % 700 : kEdges[random() % kEdges.size()];
  }
  const int64_t k = 8 * (1 + random() % 80), n = 8 * (1 + random() % 80);
  return MakeShape("random " + std::to_string(seed), sizes, random() % 200, k, n);
}

void CheckRandom(double seconds, uint32_t first_seed) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  uint32_t seed = first_seed;
  for (; Clock::now() < end; ++seed) Check(DrawShape(seed), seed);
  std::cout << "random from seed " << first_seed << " to before " << seed << ": as expected"
            << std::endl;
}

}  // namespace

cudaError_t LaunchProbedMatmul(const MatmulCall& call, SwappedVariant variant) {
  return LaunchSwappedMatmul(call, nullptr, variant, timeout);
}

}  // namespace jax_ep::matmul

int main(int argc, char** argv) {
  using namespace jax_ep::matmul;
  std::signal(SIGABRT, ReportTimeout);
  ExpectSuccess("cudaHostAlloc", cudaHostAlloc(reinterpret_cast<void**>(&timeout), sizeof(*timeout),
                                               cudaHostAllocMapped));
  *timeout = {};
  for (const Shape& shape : Shapes()) {
    Check(shape, 0);
    std::cout << shape.name << ": as expected" << std::endl;
  }
  CheckRandom(argc > 1 ? std::atof(argv[1]) : 5,
              static_cast<uint32_t>(argc > 3 ? std::atoll(argv[3]) : 1));
  TimeMatmuls(argc > 2 ? argv[2] : "");
}
