// Compares the arithmetic of the token formats on a GPU with that on the host, bit by bit, and the
// host's conversions with those of NVIDIA's headers, which define what the instructions give; and
// the fast paths of dispatch and fused_silu with the definitions that they must agree with.

#include <cuda_runtime_api.h>

// Shipped with CUDA 12.8 and newer. The headers are not free of warnings.
#if __has_include(<cuda_fp4.h>)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#include <cuda_fp4.h>
#include <cuda_fp8.h>
#pragma GCC diagnostic pop
#define JAX_EP_HAS_FP4_HEADER
#endif

#include <cmath>
#include <cstdio>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "core/quantize.h"
#include "host/encode.h"
#include "tests/p2p/p2p_memory.h"
#include "tests/unit/check.h"
#include "tests/unit/fast_paths.h"

namespace jax_ep::p2p {
namespace {

// Encodes a block of elements per thread, to one code per byte and the scale.
template <class Format>
__global__ void Encode(const float* values, int64_t n_blocks, InputScale input_scale,
                       uint8_t* codes, typename Format::Scale* scales) {
  const int64_t block = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (block >= n_blocks) return;
  const float* const mine = values + block * Format::kBlockSize;
  uint32_t largest = 0;
  for (int i = 0; i < Format::kBlockSize; ++i) {
    const uint32_t magnitude = MagnitudeBits(mine[i]);
    largest = magnitude > largest ? magnitude : largest;
  }
  const bool is_dead = largest >= kFloatInfinity;
  const float amax = is_dead ? 0.0f : Bounded<Format>(FloatFromBits(largest));
  const auto encoded = Format::EncodeScale(amax, input_scale);
  scales[block] = encoded.scale;
  const auto scaled = [&](int i) {
    return Format::ScaleElement(is_dead ? 0.0f : Bounded<Format>(mine[i]), encoded.factor);
  };
  for (int i = 0; i < Format::kBlockSize; i += 2) {
    uint8_t* const two = codes + block * Format::kBlockSize + i;
    if constexpr (Format::kElement == Element::kE2m1) {
      const uint8_t pair = ToE2m1Pair(scaled(i), scaled(i + 1));
      two[0] = pair & 15, two[1] = pair >> 4;
    } else {
      const uint16_t pair = ToE4m3Pair(scaled(i), scaled(i + 1));
      two[0] = pair & 255, two[1] = pair >> 8;
    }
  }
}

template <class Format>
void CompareWithHost(const char* name, const std::vector<float>& values, float input_scale_value) {
  const host::Encoder encode = host::FindEncoder(*FindTokenFormat(name), RowType::kFloat32);
  using Scale = typename Format::Scale;
  const auto input_scale = InputScale::Make(input_scale_value);
  const int64_t size = static_cast<int64_t>(values.size()), n_blocks = size / Format::kBlockSize;
  const DeviceArray<float> device_values = OnDevice(values);
  const DeviceArray<uint8_t> device_codes(size);
  const DeviceArray<Scale> device_scales(n_blocks);
  Encode<Format><<<static_cast<unsigned>((n_blocks + 127) / 128), 128>>>(
      device_values.get(), n_blocks, input_scale, device_codes.get(), device_scales.get());
  CHECK_CUDA(cudaGetLastError());
  const std::vector<uint8_t> codes = device_codes.Read();
  const std::vector<Scale> scales = device_scales.Read();
  std::vector<uint8_t> wanted(size);
  std::vector<Scale> wanted_scales(n_blocks);
  encode(values.data(), size, input_scale, wanted.data(),
         reinterpret_cast<uint8_t*>(wanted_scales.data()));
  for (int64_t i = 0; i < size; ++i) {
    const int expected =
        Format::kIsPacked ? wanted[i / 2] >> (i % 2 * 4) & 15 : static_cast<int>(wanted[i]);
    if (codes[i] != expected) CHECK_EQ(std::string(name) + " " + std::to_string(i), "equal");
  }
  for (int64_t i = 0; i < n_blocks; ++i) {
    if (scales[i] != wanted_scales[i]) CHECK_EQ(std::string(name) + " scale", "equal");
  }
  std::cout << name << ": " << size << " numbers, input scale " << input_scale_value << std::endl;
}

// Every bfloat16; numbers of all exponents with uniform fractions; blocks of one magnitude.
std::vector<float> Numbers() {
  std::mt19937 random(1);
  std::vector<float> numbers;
  for (uint32_t bits = 0; bits < 1 << 16; ++bits) numbers.push_back(FloatFromBits(bits << 16));
  for (int i = 0; i < 1 << 21; ++i) numbers.push_back(FloatFromBits(random()));
  for (int block = 0; block < 1 << 15; ++block) {
    const uint32_t exponent = random() % 255 << 23;
    for (int i = 0; i < 128; ++i) {
      numbers.push_back(FloatFromBits((random() & 0x807fffff) | exponent));
    }
  }
  return numbers;
}

#ifdef JAX_EP_HAS_FP4_HEADER
void TestConversionsAreThoseOfTheHeaders(const std::vector<float>& numbers) {
  for (const float number : numbers) {
    if (std::isnan(number)) continue;
    const int fp8 = __nv_cvt_float_to_fp8(number, __NV_SATFINITE, __NV_E4M3);
    const int fp4 = __nv_cvt_float_to_fp4(number, __NV_E2M1, cudaRoundNearest);
    if (ToE4m3(number) != fp8) CHECK_EQ(static_cast<int>(ToE4m3(number)), fp8);
    if (ToE2m1(number) != fp4) CHECK_EQ(static_cast<int>(ToE2m1(number)), fp4);
    // The scale of MXFP8 is the raw scale, rounded up to E8M0 by the header.
    const float raw = std::fabs(number) * (1.0f / 448.0f);
    if (std::isinf(raw)) continue;
    const int e8m0 = __nv_cvt_float_to_e8m0(raw, __NV_SATFINITE, cudaRoundPosInf);
    const int scale = MxFp8::EncodeScale(std::fabs(number), InputScale::Make(1.0f)).scale;
    if (scale != e8m0) CHECK_EQ(scale, e8m0);
  }
  std::cout << "conversions are those of the headers" << std::endl;
}
#endif

// ReciprocalRn over the range in which it is used: every significand, exponents -126 to 125.
__global__ void CompareReciprocals(unsigned* n_wrong) {
  const uint32_t fraction = blockIdx.x * blockDim.x + threadIdx.x;
  for (uint32_t exponent = 1; exponent < 127 + 126; ++exponent) {
    const float value = FloatFromBits(exponent << 23 | fraction);
    if (FloatBits(ReciprocalRn(value)) != FloatBits(__frcp_rn(value))) atomicAdd(n_wrong, 1);
  }
}

// Codes of quotients of all magnitudes, and of quotients at and near the midpoint of two codes.
__global__ void CompareQuotients(unsigned* n_wrong) {
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  for (uint32_t i = 0; i < 512; ++i) {
    uint32_t a = (thread * 512 + i) * 2654435761u, b = (thread * 512 + i) * 2246822519u + 77;
    a ^= a >> 15, b ^= b >> 13;
    const float amax = FloatFromBits(b % 0x7f800000);
    const float scale = BlockwiseFp8::EncodeScale(amax, {}).scale;
    const float tie = __fmul_rn(scale, static_cast<float>(2 * (a >> 8 & 127) + 1) / 16);
    for (const float value : {FloatFromBits(a & 0x7f7fffff), -tie,
                              FloatFromBits(FloatBits(tie) + 1), __fmul_rn(tie, 0.99999994f)}) {
      if (fabsf(value) > amax) continue;
      const float got = BlockwiseFp8::ScaleElement(value, scale), wanted = __fdiv_rn(value, scale);
      if (ToE4m3(got) != ToE4m3(wanted)) atomicAdd(n_wrong, 1);
    }
  }
}

// Words of e2m1, of which a thread compares 32; NaN counts as 0.
__global__ void CompareWords(unsigned* n_wrong) {
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  for (uint32_t first = 0; first < 256; first += 8) {
    float values[8];
    for (uint32_t i = 0; i < 8; ++i) {
      const float value = FloatFromBits(thread * 256 + first + i);
      values[i] = value == value ? value : 0.0f;
    }
    if (const unsigned n = CountWrongWords(values)) atomicAdd(n_wrong, n);
  }
}

// Scales of all magnitudes, 256 per thread.
__global__ void CompareScales(unsigned* n_wrong) {
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  for (uint32_t i = 0; i < 256; ++i) {
    const float amax = FloatFromBits((thread * 256 + i) & 0x7fffffff);
    const bool is_wrong = TryFastScale<BlockwiseFp8>(amax, {}).is_wrong ||
                          TryFastScale<MxFp8>(amax, {}).is_wrong ||
                          TryFastScale<MxFp4>(amax, {}).is_wrong ||
                          TryFastScale<NvFp4>(amax, InputScale::Make(1.0f)).is_wrong ||
                          TryFastScale<NvFp4>(amax, InputScale::Make(0.3f)).is_wrong;
    if (is_wrong) atomicAdd(n_wrong, 1);
  }
}

void TestFastPaths() {
  const DeviceArray<unsigned> n_wrong = OnDevice(std::vector<unsigned>(4));
  CompareReciprocals<<<(1 << 23) / 256, 256>>>(n_wrong.get());
  CompareQuotients<<<4096, 256>>>(n_wrong.get() + 1);
  CompareWords<<<(1 << 24) / 256, 256>>>(n_wrong.get() + 2);
  CompareScales<<<(1 << 23) / 256, 256>>>(n_wrong.get() + 3);
  CHECK_CUDA(cudaGetLastError());
  for (const unsigned count : n_wrong.Read()) CHECK_EQ(count, 0u);
  std::cout << "reciprocals, quotients, e2m1 codes and scales are exact" << std::endl;
}

}  // namespace
}  // namespace jax_ep::p2p

int main() {
  using namespace jax_ep;
  using namespace jax_ep::p2p;
  const std::vector<float> numbers = Numbers();
#ifdef JAX_EP_HAS_FP4_HEADER
  TestConversionsAreThoseOfTheHeaders(numbers);
#endif
  int n_devices = 0;
  if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
    std::cout << "quantize_test: no GPU, host part passed" << std::endl;
    return 0;
  }
  TestFastPaths();
  CompareWithHost<BlockwiseFp8>("blockwise_fp8", numbers, 1.0f);
  CompareWithHost<MxFp8>("mxfp8", numbers, 1.0f);
  CompareWithHost<MxFp4>("mxfp4", numbers, 1.0f);
  for (const float input_scale : {1.0f, 0.3f, 1e-38f, 3e38f, 0x1p-140f, 0.0f}) {
    CompareWithHost<NvFp4>("nvfp4", numbers, input_scale);
  }
  std::cout << "quantize_test: all passed" << std::endl;
}
