// Tests of the kernels for gradients in FP8 on a Hopper GPU: codes and scales against the host's
// arithmetic, bit by bit, and sums of products against a plain kernel. Fixed cases, then random
// ones for as many seconds as the first argument says; with 0, as under compute-sanitizer, small
// ones only. The second argument is the seed of the first random case.

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "layer/matmul/fp8_gradient.h"
#include "layer/matmul/kernels.h"
#include "tests/unit/fp8_quantize_cases.cuh"
#include "tests/unit/matmul_case.cuh"
#include "tests/unit/matmul_swapped_cases.cuh"

namespace jax_ep::matmul {
namespace {

// Codes along columns: any, or small integers with scales that are powers of two, whose sums of
// products are exact. Zeros fill the blocks of groups; the others have NaN.
enum class Codes { kAny, kExact };

__global__ void FillColumns(uint8_t* codes, int64_t n_columns, int64_t line, const int* sizes,
                            Codes kind, uint32_t seed) {
  for (int64_t i = ThreadIndex(); i < n_columns * line; i += NumThreads()) {
    const int size = sizes[i % line / kBlock];
    const uint32_t bits = Hash(i, seed);
    const auto any = static_cast<uint8_t>((bits & 0x7f) == kNanCode ? 0 : bits & 0xff);
    const uint8_t integers[] = {0, 0x38, 0x40, 0xb8, 0xc0};  // 0, 1, 2, -1, -2
    const uint8_t code = kind == Codes::kAny ? any : integers[bits % 5];
    codes[i] = size == 0 ? kNanCode : i % kBlock < size ? code : 0;
  }
}

__global__ void FillColumnScales(float* scales, int64_t n_columns, int64_t n_blocks,
                                 const int* sizes, Codes kind, uint32_t seed) {
  for (int64_t i = ThreadIndex(); i < n_columns * n_blocks; i += NumThreads()) {
    const float any = 0.01f * (0.5f + 1.5f * Uniform(i, seed));
    const float exact = FloatFromBits((124 + Hash(i, seed) % 7) << 23);
    scales[i] = sizes[i / n_columns] == 0 ? FloatFromBits(0x7fc00000)
                : kind == Codes::kAny     ? any
                                          : exact;
  }
}

// What LaunchCodesGradient must give; of any codes, a range.
__global__ void CheckGradient(const MatmulCall call, const int64_t* first_blocks, Codes kind,
                              int64_t size, Finding* finding) {
  for (int64_t index = ThreadIndex(); index < size; index += NumThreads()) {
    const int64_t group = index / (call.k * call.n);
    const int64_t row = index / call.n % call.k, column = index % call.n;
    float sum = 0;
    double exact = 0, magnitude = 0;
    for (int64_t block = first_blocks[group]; block < first_blocks[group + 1]; ++block) {
      double products = 0, magnitudes = 0;
      for (int64_t i = block * kBlock; i < (block + 1) * kBlock; ++i) {
        const double product = Product(call, row * call.n_rows + i, column * call.n_rows + i);
        products += product, magnitudes += fabs(product);
      }
      const float scale = __fmul_rn(call.lhs_scales[block * call.k + row],
                                    call.rhs_scales[block * call.n + column]);
      sum = __fmaf_rn(static_cast<float>(products), scale, sum);
      exact += products * scale, magnitude += magnitudes * scale;
    }
    // As in SumError, but all terms of a block are there, if only as zeros.
    const int64_t n_terms = ClampedOffset(call, group + 1) - ClampedOffset(call, group);
    const double few = sqrt(128.0 / static_cast<double>(n_terms));
    const double error = kind == Codes::kExact ? 0 : 2e-3 * fmax(1.0, few) * magnitude;
    float low = RoundTo(call.out_type, kind == Codes::kExact ? sum : exact - error);
    float high = RoundTo(call.out_type, kind == Codes::kExact ? sum : exact + error);
    const bool is_empty = first_blocks[group] == first_blocks[group + 1];
    const uint32_t added_to = call.accumulates ? AccumulatorBits(call, index) : 0;
    uint32_t bits;
    float got;
    if (call.out_type == RowType::kFloat32) {
      bits = static_cast<const uint32_t*>(call.out)[index], got = FloatFromBits(bits);
    } else {
      bits = static_cast<const uint16_t*>(call.out)[index];
      got = ToFloat(BFloat16{static_cast<uint16_t>(bits)});
    }
    if (call.accumulates) low += FloatFromBits(added_to), high += FloatFromBits(added_to);
    const bool is_right = is_empty ? bits == added_to : low <= got && got <= high;
    if (is_right || atomicAdd(&finding->n_wrong, 1) > 0) continue;
    finding->index = index, finding->bits = bits;
    finding->got = got, finding->low = low, finding->high = high;
  }
}

class GradientCase {
 public:
  GradientCase(const Shape& shape, Codes kind, RowType out_type, bool accumulates, uint32_t seed)
      : kind_(kind),
        n_blocks_(MaxRowBlocks(shape.n_rows, shape.n_groups())),
        lhs_(shape.k * n_blocks_ * kBlock),
        rhs_(shape.n * n_blocks_ * kBlock),
        lhs_scales_(n_blocks_ * shape.k * sizeof(float)),
        rhs_scales_(n_blocks_ * shape.n * sizeof(float)),
        row_offsets_(shape.row_offsets.size() * sizeof(uint32_t)),
        first_blocks_(shape.row_offsets.size() * sizeof(int64_t)),
        sizes_((n_blocks_ + 1) * sizeof(int)),
        out_(shape.n_groups() * shape.k * shape.n * ElementBytes(out_type)),
        again_(out_.size()),
        workspace_(MatmulWorkspaceBytes(shape.n_groups())),
        finding_(sizeof(Finding)) {
    call_.form = MatmulForm::kRows, call_.element = Element::kE4m3;
    call_.out_type = out_type, call_.accumulates = accumulates;
    call_.n_rows = n_blocks_ * kBlock, call_.n_groups = shape.n_groups();
    call_.k = shape.k, call_.n = shape.n;
    call_.lhs = lhs_.As<void>(), call_.rhs = rhs_.As<void>();
    call_.lhs_scales = lhs_scales_.As<float>(), call_.rhs_scales = rhs_scales_.As<float>();
    call_.row_offsets = row_offsets_.As<uint32_t>();
    call_.workspace = workspace_.As<void>(), call_.workspace_bytes = workspace_.size();
    name_ = std::string("gradient, ") + (kind == Codes::kExact ? "exact, " : "any codes, ") +
            shape.name + ", L " + std::to_string(shape.n_groups()) + ", k " +
            std::to_string(shape.k) + ", n " + std::to_string(shape.n) + ", to type " +
            std::to_string(static_cast<int>(out_type)) + (accumulates ? ", accumulates" : "");
    Fill(shape, seed);
  }

  void Run() {
    Launch(out_), Launch(again_);
    ExpectSuccess(name_, cudaDeviceSynchronize());
    Check();
    ExpectSameBytes(name_ + ": two runs", out_.As<uint8_t>(), again_.As<uint8_t>(), out_.size());
    for (const Buffer* buffer : {&out_, &again_, &workspace_}) {
      ExpectSameBytes(name_ + ": past the end", buffer->guard(), nullptr, kGuardBytes);
    }
  }

  // Without waiting for the launches before it.
  void Launch(const Buffer& out) {
    call_.out = out.As<void>();
    ExpectSuccess(name_, cudaMemsetAsync(call_.out, kCanary, out.size()));
    if (call_.accumulates) {
      FillAccumulator<<<kTestBlocks, kTestThreads>>>(call_, call_.out_elements());
    }
    ExpectSuccess(name_, hopper::LaunchCodesGradient(call_, nullptr));
  }
  void LaunchAgain() { Launch(again_); }

 private:
  void Fill(const Shape& shape, uint32_t seed) {
    std::vector<int> sizes(n_blocks_ + 1);
    std::vector<int64_t> first_blocks(shape.row_offsets.size());
    const std::vector<RowBlock> blocks = BlocksOf(shape);
    for (size_t i = 0; i < blocks.size(); ++i) {
      sizes[i] = static_cast<int>(blocks[i].end - blocks[i].first);
      ++first_blocks[blocks[i].group + 1];
    }
    for (size_t i = 1; i < first_blocks.size(); ++i) first_blocks[i] += first_blocks[i - 1];
    CopyIn(sizes_, sizes), CopyIn(first_blocks_, first_blocks);
    CopyIn(row_offsets_, shape.row_offsets);
    const auto fill = [&](const Buffer& codes, const Buffer& scales, int64_t n, uint32_t of_seed) {
      FillColumns<<<kTestBlocks, kTestThreads>>>(codes.As<uint8_t>(), n, call_.n_rows,
                                                 sizes_.As<int>(), kind_, of_seed);
      FillColumnScales<<<kTestBlocks, kTestThreads>>>(scales.As<float>(), n, n_blocks_,
                                                      sizes_.As<int>(), kind_, of_seed + 1);
    };
    fill(lhs_, lhs_scales_, call_.k, 4 * seed), fill(rhs_, rhs_scales_, call_.n, 4 * seed + 2);
    ExpectSuccess("operands", cudaDeviceSynchronize());
  }

  void Check() {
    call_.out = out_.As<void>();
    Finding finding{};
    auto* const on_device = finding_.As<Finding>();
    ExpectSuccess(name_, cudaMemset(on_device, 0, sizeof(finding)));
    CheckGradient<<<kTestBlocks, kTestThreads>>>(call_, first_blocks_.As<int64_t>(), kind_,
                                                 call_.out_elements(), on_device);
    ExpectSuccess(name_, cudaMemcpy(&finding, on_device, sizeof(finding), cudaMemcpyDefault));
    if (finding.n_wrong == 0) return;
    std::cerr << name_ << ": " << finding.n_wrong << " of " << call_.out_elements()
              << " elements are wrong; row " << finding.index / call_.n << ", column "
              << finding.index % call_.n << " is " << finding.got << ", expected " << finding.low
              << " to " << finding.high << std::endl;
    CHECK_EQ(finding.n_wrong, 0u);
  }

  const Codes kind_;
  const int64_t n_blocks_;
  const Buffer lhs_, rhs_, lhs_scales_, rhs_scales_, row_offsets_, first_blocks_, sizes_, out_,
      again_, workspace_, finding_;
  MatmulCall call_{};
  std::string name_;
};

// Returns the number of cases.
int CheckGradients(const Shape& shape, uint32_t seed) {
  if (shape.n_rows == 0 || shape.row_offsets.back() > shape.n_rows) return 0;
  for (const Codes kind : {Codes::kExact, Codes::kAny}) {
    GradientCase(shape, kind, RowType::kBFloat16, false, seed).Run();
    for (const bool accumulates : {false, true}) {
      GradientCase(shape, kind, RowType::kFloat32, accumulates, seed).Run();
    }
  }
  return 6;
}

// Kernels that start before the one ahead of them has ended, with many rows and with few.
int CheckChainOfGradients() {
  constexpr auto kType = RowType::kFloat32;
  const Shape many = MakeShape("many rows", Multinomial(16, 16 * 700, 4), 5, 520, 1024);
  const Shape few = MakeShape("few rows", Multinomial(64, 64 * 40, 5), 5, 264, 136);
  GradientCase large(many, Codes::kExact, kType, true, 1);
  GradientCase small(few, Codes::kExact, kType, false, 2);
  large.Run(), small.Run();
  for (int i = 0; i < 50; ++i) large.LaunchAgain(), small.LaunchAgain();
  ExpectSuccess("a chain", cudaDeviceSynchronize());
  large.Run(), small.Run();
  return 2;
}

std::vector<Shape> SmallShapes() {
  return {MakeShape("one row", {1}, 3, 8, 8), MakeShape("one block", {128}, 0, 128, 128),
          MakeShape("few rows", {1, 130, 0, 8, 127}, 20, 264, 136),
          MakeShape("all groups empty", std::vector<uint32_t>(9), 130, 136, 264)};
}

std::vector<Shape> Shapes() {
  std::vector<Shape> shapes;
  for (const Shape& shape : SwappedShapes()) {  // without the large ones
    if (shape.n_groups() * shape.k * shape.n < 1 << 26) shapes.push_back(shape);
  }
  shapes.push_back(MakeShape("bands of columns", {40, 0, 300}, 9, 520, 8456));
  shapes.push_back(MakeShape("many rows of the matrix", {33}, 0, 20008, 24));
  shapes.push_back(MakeShape("more groups than a table has room for in shared memory",
                             Multinomial(1500, 3000, 3), 7, 24, 40));
  return shapes;
}

int Test(double seconds, uint32_t first_seed) {
  using Clock = std::chrono::steady_clock;
  int n_cases = 0;
  for (const Shape& shape : SmallShapes())
    n_cases += CheckQuantize(shape, 0) + CheckGradients(shape, 0);
  if (seconds <= 0) return n_cases;
  n_cases += CheckChainOfGradients();
  for (const Shape& shape : Shapes()) {
    n_cases += CheckQuantize(shape, 0) + CheckGradients(shape, 0);
    std::cout << shape.name << std::endl;
  }
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  uint32_t seed = first_seed;
  for (; Clock::now() < end; ++seed) {
    Shape shape = DrawSwappedShape(seed);
    const uint32_t n_before = seed % 3;  // rows of no group
    shape.n_rows += n_before;
    for (uint32_t& offset : shape.row_offsets) offset += n_before;
    n_cases += CheckQuantize(shape, seed) + CheckGradients(shape, seed);
  }
  std::cout << "random from seed " << first_seed << " to before " << seed << std::endl;
  return n_cases;
}

}  // namespace
}  // namespace jax_ep::matmul

int main(int argc, char** argv) {
  using namespace jax_ep::matmul;
  int n_devices = 0;
  if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0 || !IsHopper()) {
    std::cout << "fp8_gradient_test: no Hopper GPU" << std::endl;
    return 1;
  }
  const double seconds = argc > 1 ? std::atof(argv[1]) : 10;
  const int n_cases = Test(seconds, static_cast<uint32_t>(argc > 2 ? std::atoll(argv[2]) : 1));
  std::cout << "fp8_gradient_test: all " << n_cases << " cases passed" << std::endl;
}
