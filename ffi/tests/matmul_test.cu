// Tests of grouped matmuls on a GPU: fixed cases, then random ones for as many seconds as the first
// argument says; with 0, also without the large ones, as under compute-sanitizer. The second
// argument is the seed of the first random case.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "cuda/matmul/kernels.h"
#include "tests/check.h"
#include "tests/matmul_reference.cuh"

namespace jax_ep::p2p {
namespace {

constexpr size_t kGuardBytes = 1024;
constexpr unsigned kTestBlocks = 4096;

void ExpectSuccess(const std::string& what, cudaError_t error) {
  CHECK_EQ(what + ": " + cudaGetErrorString(error), what + ": no error");
}

// Device memory full of canaries, with more of them at its end.
class Buffer {
 public:
  explicit Buffer(size_t size) : size_(size) {
    ExpectSuccess("cudaMalloc", cudaMalloc(&data_, size + kGuardBytes));
    ExpectSuccess("cudaMemset", cudaMemset(data_, kCanary, size + kGuardBytes));
  }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;

  template <class T>
  T* As() const {
    return static_cast<T*>(data_);
  }

  size_t size() const { return size_; }
  uint8_t* guard() const { return As<uint8_t>() + size_; }

 private:
  size_t size_;
  void* data_ = nullptr;
};

struct Backend {
  std::string name;
  cudaError_t (*launch)(const MatmulCall&, cudaStream_t);
  bool takes_e4m3;
};

struct Shape {
  std::string name;
  std::vector<uint32_t> row_offsets;
  int64_t n_rows, k, n;

  int64_t n_groups() const { return static_cast<int64_t>(row_offsets.size()) - 1; }
  int64_t n_used() const { return std::min(int64_t{row_offsets.back()}, n_rows); }
};

Shape MakeShape(const std::string& name, const std::vector<uint32_t>& sizes, int64_t n_unused,
                int64_t k, int64_t n) {
  Shape shape{name, {0}, 0, k, n};
  for (const uint32_t size : sizes) shape.row_offsets.push_back(shape.row_offsets.back() + size);
  shape.n_rows = shape.row_offsets.back() + n_unused;
  return shape;
}

struct Variant {
  MatmulForm form;
  Element element;
  RowType out_type;
  bool zeroes_unused;
};

std::string Describe(const Backend& backend, const Shape& shape, const Variant& variant) {
  std::ostringstream text;
  text << backend.name << ", " << shape.name << ": form " << static_cast<int>(variant.form) << ", "
       << Name(variant.element) << " to type " << static_cast<int>(variant.out_type)
       << (variant.zeroes_unused ? ", zeroes unused" : "") << ", C " << shape.n_rows << ", L "
       << shape.n_groups() << ", k " << shape.k << ", n " << shape.n;
  return text.str();
}

// The operands of a call, and two results of it.
class DeviceCase {
 public:
  DeviceCase(const Shape& shape, const Variant& variant, uint32_t seed)
      : call_(MakeCall(shape, variant)),
        lhs_(call_.n_rows * call_.k * InputBytes()),
        rhs_(RhsElements() * InputBytes()),
        row_offsets_(shape.row_offsets.size() * sizeof(uint32_t)),
        lhs_scales_(NumScaleBlocks(call_.k) * call_.n_rows * sizeof(float)),
        rhs_scales_(call_.n_groups * NumScaleBlocks(call_.n) * NumScaleBlocks(call_.k) *
                    sizeof(float)),
        out_(OutBytes()),
        again_(OutBytes()),
        workspace_(MatmulWorkspaceBytes(call_.n_groups)),
        finding_(sizeof(Finding)) {
    Fill(shape, seed);
    call_.lhs = lhs_.As<void>();
    call_.rhs = rhs_.As<void>();
    call_.row_offsets = row_offsets_.As<uint32_t>();
    call_.workspace = workspace_.As<void>();
    call_.workspace_bytes = workspace_.size();
  }

  void Run(const Backend& backend, const std::string& name) {
    for (const Buffer* const out : {&out_, &again_}) {
      call_.out = out->As<void>();
      ExpectSuccess(name, backend.launch(call_, nullptr));
      ExpectSuccess(name, cudaDeviceSynchronize());
    }
    Check(name);
    ExpectSame(name + ": two runs", out_.As<uint8_t>(), again_.As<uint8_t>(), out_.size());
    ExpectSame(name + ": past the end of the result", out_.guard(), nullptr, kGuardBytes);
    ExpectSame(name + ": past the end of the workspace", workspace_.guard(), nullptr, kGuardBytes);
  }

 private:
  static MatmulCall MakeCall(const Shape& shape, const Variant& variant) {
    MatmulCall call{};
    call.form = variant.form, call.element = variant.element;
    call.out_type = variant.out_type, call.zeroes_unused = variant.zeroes_unused;
    call.n_rows = shape.n_rows, call.n_groups = shape.n_groups();
    call.k = shape.k, call.n = shape.n;
    return call;
  }

  bool is_e4m3() const { return call_.element == Element::kE4m3; }
  int64_t InputBytes() const { return ElementBits(call_.element) / 8; }
  size_t OutBytes() const { return call_.out_elements() * ElementBytes(call_.out_type); }

  int64_t RhsElements() const {
    const bool is_rows = call_.form == MatmulForm::kRows;
    return (is_rows ? call_.n_rows : call_.n_groups * call_.k) * call_.n;
  }

  // Of a dimension; none without scales.
  int64_t NumScaleBlocks(int64_t size) const {
    return is_e4m3() ? (size + kMatmulScaleBlock - 1) / kMatmulScaleBlock : 0;
  }

  // Rows that are not in use are NaN.
  void Fill(const Shape& shape, uint32_t seed) {
    const int64_t n_used = shape.n_used();
    const int64_t used_rhs = call_.form == MatmulForm::kRows ? n_used * call_.n : RhsElements();
    FillElements<<<kTestBlocks, kTestThreads>>>(lhs_.As<void>(), call_.element,
                                                call_.n_rows * call_.k, n_used * call_.k, seed);
    FillElements<<<kTestBlocks, kTestThreads>>>(rhs_.As<void>(), call_.element, RhsElements(),
                                                used_rhs, seed + 1);
    ExpectSuccess("cudaMemcpy", cudaMemcpy(row_offsets_.As<void>(), shape.row_offsets.data(),
                                           row_offsets_.size(), cudaMemcpyHostToDevice));
    if (!is_e4m3()) return;
    const auto fill = [&](const Buffer& scales, int64_t n_columns, int64_t n_used, uint32_t seed) {
      const auto size = static_cast<int64_t>(scales.size() / sizeof(float));
      FillScales<<<kTestBlocks, kTestThreads>>>(scales.As<float>(), size, n_columns, n_used, seed);
      return scales.As<float>();
    };
    call_.lhs_scales = fill(lhs_scales_, call_.n_rows, n_used, seed + 2);
    call_.rhs_scales = fill(rhs_scales_, 1, 1, seed + 3);
  }

  void Check(const std::string& name) {
    call_.out = out_.As<void>();
    Finding finding{};
    auto* const device_finding = finding_.As<Finding>();
    ExpectSuccess(name, cudaMemset(device_finding, 0, sizeof(finding)));
    CheckElements<<<kTestBlocks, kTestThreads>>>(call_, call_.out_elements(), device_finding);
    ExpectSuccess(name, cudaMemcpy(&finding, device_finding, sizeof(finding), cudaMemcpyDefault));
    if (finding.n_wrong == 0) return;
    std::cerr << name << ": " << finding.n_wrong << " of " << call_.out_elements()
              << " elements are wrong; row " << finding.index / call_.n << ", column "
              << finding.index % call_.n << " is " << finding.got << " (bits " << std::hex
              << finding.bits << std::dec << "), expected " << finding.low << " to " << finding.high
              << std::endl;
    CHECK_EQ(finding.n_wrong, 0u);
  }

  void ExpectSame(const std::string& what, const uint8_t* a, const uint8_t* b, size_t size) {
    unsigned n_different = 0;
    auto* const counter = finding_.As<unsigned>();
    ExpectSuccess(what, cudaMemset(counter, 0, sizeof(n_different)));
    CountDifferences<<<kTestBlocks, kTestThreads>>>(a, b, static_cast<int64_t>(size), counter);
    ExpectSuccess(what, cudaMemcpy(&n_different, counter, sizeof(n_different), cudaMemcpyDefault));
    CHECK_EQ(what + ": " + std::to_string(n_different) + " bytes differ",
             what + ": 0 bytes differ");
  }

  MatmulCall call_;
  const Buffer lhs_, rhs_, row_offsets_, lhs_scales_, rhs_scales_, out_, again_, workspace_,
      finding_;
};

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
  return RunShapes(backend,
                   {MakeShape("more than 2^31 elements of rows", sizes, 100, 8192, 8),
                    MakeShape("more than 2^31 elements of columns", sizes, 100, 8, 8192)},
                   variants);
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
}  // namespace jax_ep::p2p

int main(int argc, char** argv) {
  using namespace jax_ep::p2p;
  int n_devices = 0, major = 0;
  if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
    std::cout << "matmul_test: no GPU" << std::endl;
    return 1;
  }
  ExpectSuccess("cudaDeviceGetAttribute",
                cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  std::vector<Backend> backends = {{"ampere", LaunchAmpereMatmul, false}};
  if (major == 9) backends.push_back({"hopper", LaunchHopperMatmul, true});
  const double seconds = argc > 1 ? std::atof(argv[1]) : 20;
  const auto first_seed = static_cast<uint32_t>(argc > 2 ? std::atoll(argv[2]) : 1);
  int n_cases = 0;
  for (const Backend& backend : backends) {
    n_cases += TestBackend(backend, seconds / static_cast<double>(backends.size()), first_seed);
  }
  std::cout << "matmul_test: all " << n_cases << " cases passed" << std::endl;
}
