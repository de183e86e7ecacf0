// Random operands of grouped matmuls, and the check of their results against sums in double.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/float_types.h"
#include "layer/matmul/matmul_call.h"

namespace jax_ep::matmul {

constexpr uint8_t kCanary = 0xee;
constexpr unsigned kTestThreads = 256;

// Where a thread starts in a grid-stride loop, and the step.
static __device__ int64_t ThreadIndex() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
static __device__ int64_t NumThreads() { return int64_t{gridDim.x} * blockDim.x; }

static __device__ uint32_t Hash(uint64_t index, uint32_t seed) {
  uint64_t bits = (index + seed * 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
  bits = (bits ^ bits >> 27) * 0x94d049bb133111ebull;
  return static_cast<uint32_t>(bits >> 32);
}

// Uniform in [0, 1).
static __device__ float Uniform(uint64_t index, uint32_t seed) {
  return static_cast<float>(Hash(index, seed) >> 8) * 0x1p-24f;
}

// Numbers in [-1, 1), or any codes of e4m3; NaN from index `n_used` on.
static __global__ void FillElements(void* data, Element element, int64_t size, int64_t n_used,
                                    uint32_t seed) {
  for (int64_t i = ThreadIndex(); i < size; i += NumThreads()) {
    if (element == Element::kE4m3) {
      const auto code = static_cast<uint8_t>(Hash(i, seed));
      const bool is_nan = (code & 0x7f) == 0x7f;
      static_cast<uint8_t*>(data)[i] = i >= n_used ? 0x7f : is_nan ? 0 : code;
      continue;
    }
    const float value = i < n_used ? 2 * Uniform(i, seed) - 1 : FloatFromBits(0x7fc00000);
    if (element == Element::kBFloat16) {
      static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(value);
    } else {
      static_cast<__half*>(data)[i] = __float2half_rn(value);
    }
  }
}

// Rows of `n_columns` scales; NaN from column `n_used` on.
static __global__ void FillScales(float* scales, int64_t size, int64_t n_columns, int64_t n_used,
                                  uint32_t seed) {
  for (int64_t i = ThreadIndex(); i < size; i += NumThreads()) {
    const bool is_used = i % n_columns < n_used;
    scales[i] = is_used ? 0.01f * (0.5f + 1.5f * Uniform(i, seed)) : FloatFromBits(0x7fc00000);
  }
}

static __device__ double Load(const void* data, int64_t index, Element element) {
  if (element == Element::kBFloat16) return ToFloat(static_cast<const BFloat16*>(data)[index]);
  if (element == Element::kFloat16) return ToFloat(static_cast<const Float16*>(data)[index]);
  const uint8_t code = static_cast<const uint8_t*>(data)[index];
  return code < 0x80 ? FromE4m3(code) : -FromE4m3(code & 0x7f);
}

static __device__ int64_t ClampedOffset(const MatmulCall& call, int64_t group) {
  return min(int64_t{call.row_offsets[group]}, call.n_rows);
}

// The product of an element of lhs with one of rhs.
static __device__ double Product(const MatmulCall& call, int64_t lhs, int64_t rhs) {
  return Load(call.lhs, lhs, call.element) * Load(call.rhs, rhs, call.element);
}

struct Sum {
  bool is_used = false;  // whether the element belongs to a group
  int64_t n_terms = 0;
  double value = 0, magnitude = 0;  // magnitude: the sum of the absolute values

  __device__ void Add(double product) {
    value += product;
    magnitude += fabs(product);
    ++n_terms;
  }
};

static __device__ Sum SumAlongRows(const MatmulCall& call, int64_t index) {
  const int64_t group = index / (call.k * call.n);
  const int64_t of_lhs = index / call.n % call.k, of_rhs = index % call.n;
  Sum sum{true};
  const int64_t end = ClampedOffset(call, group + 1);
  for (int64_t row = ClampedOffset(call, group); row < end; ++row) {
    sum.Add(Product(call, row * call.k + of_lhs, row * call.n + of_rhs));
  }
  return sum;
}

static __device__ Sum SumOf(const MatmulCall& call, int64_t index) {
  if (call.form == MatmulForm::kRows) return SumAlongRows(call, index);
  const int64_t row = index / call.n, column = index % call.n;
  int64_t group = 0;
  while (group < call.n_groups && row >= ClampedOffset(call, group + 1)) ++group;
  if (group == call.n_groups) return {};
  const bool is_transposed = call.form == MatmulForm::kTransposedWeights;
  const int64_t n_blocks = (call.n + kMatmulScaleBlock - 1) / kMatmulScaleBlock;
  const int64_t scale_row = group * n_blocks + column / kMatmulScaleBlock;
  Sum sum{true};
  for (int64_t t = 0; t < call.k; ++t) {
    const int64_t in_weights = is_transposed ? column * call.k + t : t * call.n + column;
    double product = Product(call, row * call.k + t, group * call.k * call.n + in_weights);
    if (call.lhs_scales != nullptr) {
      const int64_t block = t / kMatmulScaleBlock;
      product *= call.lhs_scales[block * call.n_rows + row];
      product *= call.rhs_scales[scale_row * (call.k / kMatmulScaleBlock) + block];
    }
    sum.Add(product);
  }
  return sum;
}

static __device__ float RoundTo(RowType type, double exact) {
  const auto value = static_cast<float>(exact);
  if (type == RowType::kBFloat16) return __bfloat162float(__float2bfloat16_rn(value));
  if (type == RowType::kFloat16) return __half2float(__float2half_rn(value));
  return value;
}

// A bound of the error of a sum before it is rounded. Tensor cores truncate every few terms. Errors
// of random terms grow like the sum itself, with the square root of the number of terms. Those of
// products of e4m3 are larger, since Hopper keeps 13 fractional bits of the largest; twice what a
// simulation of that gives.
static __device__ double SumError(const MatmulCall& call, const Sum& sum) {
  const auto n_terms = static_cast<double>(sum.n_terms);
  if (call.element == Element::kE4m3) return 2e-3 * sqrt(128 / n_terms) * sum.magnitude;
  return 1e-6 * fmax(1.0, sqrt(n_terms / 1024)) * sum.magnitude;
}

// What a call adds to: numbers from -4 to 4, or any bits, which are kept, where a group has no
// rows.
static __device__ uint32_t AccumulatorBits(const MatmulCall& call, int64_t index) {
  constexpr uint32_t kSeed = 99;
  const int64_t group = index / (call.k * call.n);
  const bool has_rows = ClampedOffset(call, group) < ClampedOffset(call, group + 1);
  return has_rows ? FloatBits(8 * Uniform(index, kSeed) - 4) : Hash(index, kSeed);
}

static __global__ void FillAccumulator(const MatmulCall call, int64_t size) {
  for (int64_t i = ThreadIndex(); i < size; i += NumThreads()) {
    static_cast<uint32_t*>(call.out)[i] = AccumulatorBits(call, i);
  }
}

// How many elements are wrong, and one of them.
struct Finding {
  unsigned n_wrong;
  int64_t index;
  uint32_t bits;
  float got, low, high;
};

// Checks every element of `out`: sums that are correct before they are rounded to nearest, and once
// more where they were added to it; for empty sums, zeros or what it held; zeros or canaries where
// there is no group.
static __global__ void CheckElements(const MatmulCall call, int64_t size, Finding* finding) {
  for (int64_t i = ThreadIndex(); i < size; i += NumThreads()) {
    uint32_t bits;
    float got;
    if (call.out_type == RowType::kFloat32) {
      bits = static_cast<const uint32_t*>(call.out)[i];
      got = FloatFromBits(bits);
    } else {
      bits = static_cast<const uint16_t*>(call.out)[i];
      const BFloat16 bfloat16{static_cast<uint16_t>(bits)};
      const Float16 float16{static_cast<uint16_t>(bits)};
      got = call.out_type == RowType::kBFloat16 ? ToFloat(bfloat16) : ToFloat(float16);
    }
    const Sum sum = SumOf(call, i);
    const double error = SumError(call, sum);  // unused if there are no terms
    float low = RoundTo(call.out_type, sum.value - error);
    float high = RoundTo(call.out_type, sum.value + error);
    const uint32_t added_to = call.accumulates ? AccumulatorBits(call, i) : 0;
    if (call.accumulates) low += FloatFromBits(added_to), high += FloatFromBits(added_to);
    const uint32_t canaries = kCanary * (call.out_type == RowType::kFloat32 ? 0x01010101u : 0x101u);
    bool is_right = low <= got && got <= high;
    if (sum.n_terms == 0) is_right = bits == added_to;
    if (!sum.is_used && !call.zeroes_unused) is_right = bits == canaries || call.k == 0;
    if (is_right || atomicAdd(&finding->n_wrong, 1) > 0) continue;
    finding->index = i, finding->bits = bits;
    finding->got = got, finding->low = low, finding->high = high;
  }
}

// Counts the bytes of `a` that are not those of `b` or, without b, not canaries.
static __global__ void CountDifferences(const uint8_t* a, const uint8_t* b, int64_t size,
                                        unsigned* n_different) {
  for (int64_t i = ThreadIndex(); i < size; i += NumThreads()) {
    if (a[i] != (b == nullptr ? kCanary : b[i])) atomicAdd(n_different, 1);
  }
}

}  // namespace jax_ep::matmul
