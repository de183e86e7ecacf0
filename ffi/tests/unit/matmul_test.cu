// Tests of grouped matmuls on a GPU: fixed cases, then random ones for as many seconds as the first
// argument says; with 0, also without the large ones, as under compute-sanitizer. The second
// argument is the seed of the first random case.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "layer/matmul/kernels.h"
#include "tests/unit/matmul_case.cuh"
#include "tests/unit/matmul_gated_cases.cuh"
#include "tests/unit/matmul_gated_gradient_cases.cuh"
#include "tests/unit/matmul_scaled_cases.cuh"
#include "tests/unit/matmul_shared_cases.cuh"
#include "tests/unit/matmul_swapped_cases.cuh"
#include "tests/unit/matmul_weight_gradient_cases.cuh"

namespace jax_ep::matmul {
namespace {

std::vector<Variant> PlainVariants() {
  std::vector<Variant> variants;
  for (const auto form :
       {MatmulForm::kWeights, MatmulForm::kTransposedWeights, MatmulForm::kRows}) {
    for (const bool zeroes_unused : {false, true}) {
      if (form == MatmulForm::kRows && zeroes_unused) continue;
      variants.push_back({form, Element::kBFloat16, RowType::kBFloat16, zeroes_unused});
      variants.push_back({form, Element::kBFloat16, RowType::kFloat32, zeroes_unused});
      variants.push_back({form, Element::kFloat16, RowType::kFloat16, zeroes_unused});
      variants.push_back({form, Element::kFloat16, RowType::kFloat32, zeroes_unused});
    }
  }
  for (const Element element : {Element::kBFloat16, Element::kFloat16}) {
    variants.push_back({MatmulForm::kRows, element, RowType::kFloat32, false, true});
  }
  return variants;
}

std::vector<Variant> E4m3Variants() {
  constexpr auto kForm = MatmulForm::kTransposedWeights;
  return {{kForm, Element::kE4m3, RowType::kBFloat16, false},
          {kForm, Element::kE4m3, RowType::kBFloat16, true}};
}

// Returns the number of cases.
int RunVariants(const Backend& backend, const Shape& shape, const std::vector<Variant>& variants,
                uint32_t seed = 0) {
  for (const Variant& variant : variants) {
    DeviceCase(shape, variant, seed).Run(backend, Describe(backend, shape, variant));
  }
  return static_cast<int>(variants.size());
}

int RunShapes(const Backend& backend, const std::vector<Shape>& shapes,
              const std::vector<Variant>& variants) {
  int n_cases = 0;
  for (const Shape& shape : shapes) {
    const int n = RunVariants(backend, shape, variants);
    std::cout << backend.name << ", " << shape.name << ": " << n << " cases" << std::endl;
    n_cases += n;
  }
  return n_cases;
}

const std::vector<uint32_t> kUnaligned = {1, 3, 0, 63, 64, 65, 0, 127, 128, 129, 1000};

std::vector<uint32_t> OneGroupOf(int n_groups, int group, uint32_t size) {
  std::vector<uint32_t> sizes(n_groups);
  sizes[group] = size;
  return sizes;
}

std::vector<Shape> PlainShapes() {
  std::vector<Shape> shapes = {
      MakeShape("one group", {300}, 0, 264, 136),
      MakeShape("one row", {1}, 3, 8, 8),
      MakeShape("unaligned sizes", kUnaligned, 77, 264, 392),
      MakeShape("smallest k", kUnaligned, 5, 8, 264),
      MakeShape("smallest n", kUnaligned, 5, 1032, 8),
      MakeShape("all groups empty", std::vector<uint32_t>(9), 130, 136, 264),
      MakeShape("one group of many", OneGroupOf(70, 41, 257), 9, 128, 128),
      MakeShape("last group only", OneGroupOf(33, 32, 64), 0, 72, 16),
      MakeShape("more tiles than blocks", {5000, 0, 1, 4999, 3}, 100, 128, 1032),
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

std::vector<Shape> E4m3Shapes() {
  return {
      MakeShape("e4m3, one group", {300}, 0, 256, 144),
      MakeShape("e4m3, unaligned sizes", kUnaligned, 77, 384, 2880),
      MakeShape("e4m3, smallest", kUnaligned, 5, 128, 16),
      MakeShape("e4m3, long k", {65, 0, 129}, 3, 7168, 272),
      MakeShape("e4m3, all groups empty", std::vector<uint32_t>(9), 130, 128, 256),
      MakeShape("e4m3, one group of many", OneGroupOf(70, 41, 257), 9, 128, 128),
      MakeShape("e4m3, more tiles than blocks", {5000, 0, 1, 4999, 3}, 100, 128, 1040),
  };
}

// Operands, then results, of more than 2^31 elements.
int RunLarge(const Backend& backend) {
  size_t free_bytes = 0, total_bytes = 0;
  ExpectSuccess("cudaMemGetInfo", cudaMemGetInfo(&free_bytes, &total_bytes));
  if (free_bytes < size_t{32} << 30) {
    std::cout << backend.name << ", more than 2^31 elements: needs 32 GiB, skipped" << std::endl;
    return 0;
  }
  const std::vector<uint32_t> sizes = {100000, 70000, 1, 100000};
  std::vector<Variant> variants;
  for (const Variant& variant : PlainVariants()) {
    if (variant.out_type == RowType::kBFloat16) variants.push_back(variant);
  }
  const int n_cases =
      RunShapes(backend,
                {MakeShape("more than 2^31 elements of rows", sizes, 100, 8192, 8),
                 MakeShape("more than 2^31 elements of columns", sizes, 100, 8, 8192)},
                variants);
  if (!backend.takes_e4m3) return n_cases;
  return n_cases + RunShapes(backend,
                             {MakeShape("more than 2^31 codes of rows", sizes, 100, 8192, 8),
                              MakeShape("more than 2^31 results", sizes, 100, 128, 8192)},
                             E4m3Variants());
}

std::vector<uint32_t> DrawSizes(std::mt19937& random) {
  const uint32_t kinds[] = {0, 1, 3, 63, 64, 65, 127, 128, 129, 1000};
  std::vector<uint32_t> sizes(1 + random() % 70);
  const uint32_t percent_empty = (random() % 5) * 25;  // up to 100
  for (uint32_t& size : sizes) {
    size = random() % 4 == 0 ? random() % 300 : kinds[random() % 10];
    if (random() % 100 < percent_empty) size = 0;
  }
  return sizes;
}

// Limits the memory of a case, and the time that its reference takes.
bool IsTooLarge(const Shape& shape) {
  const int64_t matrix = shape.k * shape.n;
  return shape.n_groups() * matrix > int64_t{1} << 24 || shape.n_rows * matrix > int64_t{1} << 33;
}

Shape DrawShape(uint32_t seed, bool is_e4m3) {
  std::mt19937 random(seed);
  const std::vector<uint32_t> sizes = DrawSizes(random);
  const int64_t kinds[] = {8, 16, 24, 72, 128, 136, 256, 264, 512, 1032, 2048};
  const auto draw = [&] {
    return random() % 3 == 0 ? 8 * (1 + random() % 100) : kinds[random() % 11];
  };
  Shape shape = MakeShape("random " + std::to_string(seed), sizes, random() % 200, 0, 0);
  do {
    const int64_t k = draw(), n = draw();
    shape.k = is_e4m3 ? 128 * (1 + k / 128) : k;
    shape.n = is_e4m3 ? 16 * (1 + n / 16) : n;
  } while (IsTooLarge(shape));
  return shape;
}

int RunRandom(const Backend& backend, double seconds, uint32_t first_seed) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  int n_cases = 0;
  uint32_t seed = first_seed;
  for (; Clock::now() < end; ++seed) {
    n_cases += RunVariants(backend, DrawShape(seed, /*is_e4m3=*/false), PlainVariants(), seed);
    if (!backend.takes_e4m3) continue;
    n_cases += RunVariants(backend, DrawShape(seed, /*is_e4m3=*/true), E4m3Variants(), seed);
  }
  std::cout << backend.name << ", random from seed " << first_seed << " to before " << seed << ": "
            << n_cases << " cases" << std::endl;
  return n_cases;
}

int TestBackend(const Backend& backend, double seconds, uint32_t first_seed) {
  int n_cases = RunShapes(backend, PlainShapes(), PlainVariants());
  if (backend.takes_e4m3) n_cases += RunShapes(backend, E4m3Shapes(), E4m3Variants());
  if (seconds <= 0) return n_cases;
  return n_cases + RunLarge(backend) + RunRandom(backend, seconds, first_seed);
}

}  // namespace
}  // namespace jax_ep::matmul

int main(int argc, char** argv) {
  using namespace jax_ep::matmul;
  // Otherwise CUDA may load a kernel only when those that hold multiprocessors have ended.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  int n_devices = 0, major = 0;
  if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
    std::cout << "matmul_test: no GPU" << std::endl;
    return 1;
  }
  ExpectSuccess("cudaDeviceGetAttribute",
                cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  std::vector<Backend> backends = {{"ampere", OnStream<LaunchAmpereMatmul>, false}};
  if (major == 9) backends.push_back({"hopper", OnStream<LaunchHopperMatmul>, true});
  const double seconds = argc > 1 ? std::atof(argv[1]) : 20;
  const auto first_seed = static_cast<uint32_t>(argc > 2 ? std::atoll(argv[2]) : 1);
  const double share = seconds / (major == 9 ? 7 : 1);
  int n_cases = 0;
  if (major == 9) {
    n_cases += TestSwapped(share, first_seed) + TestGated(share, first_seed);
    n_cases += TestGatedGradient(share, first_seed) + TestScaled(share, first_seed);
    n_cases += TestWeightGradient(share, first_seed) + TestShared(seconds > 0);
  }
  for (const Backend& backend : backends) n_cases += TestBackend(backend, share, first_seed);
  std::cout << "matmul_test: all " << n_cases << " cases passed" << std::endl;
}
