// fused_silu on a GPU against the same on the host, bit by bit; then how fast it is. With the
// argument `speed`, only this.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <iostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpu/silu.h"
#include "cuda/silu.h"
#include "tests/check.h"
#include "tests/silu_parts.cuh"
#include "tests/silu_speed.cuh"

namespace jax_ep::p2p {
namespace {

constexpr uint8_t kUntouched = 0xee;

// Device memory with the bytes of a host's vector.
struct OnDevice {
  explicit OnDevice(const std::vector<uint8_t>& bytes) : size(bytes.size()) {
    CHECK_EQ(cudaMalloc(&data, size + 1), cudaSuccess);
    cudaMemcpy(data, bytes.data(), size, cudaMemcpyHostToDevice);
  }
  ~OnDevice() { cudaFree(data); }
  OnDevice(const OnDevice&) = delete;

  std::vector<uint8_t> Read() const {
    std::vector<uint8_t> bytes(size);
    CHECK_EQ(cudaMemcpy(bytes.data(), data, size, cudaMemcpyDeviceToHost), cudaSuccess);
    return bytes;
  }

  size_t size;
  void* data = nullptr;
};

int64_t Bytes(RowType type) { return type == RowType::kFloat32 ? 4 : 2; }

// Whether the element at `at` is NaN: the bits of NaN are not promised.
bool IsNan(const uint8_t* at, RowType type) {
  uint32_t bits = 0;
  std::memcpy(&bits, at, Bytes(type));
  if (type == RowType::kFloat32) return (bits & 0x7fffffff) > 0x7f800000;
  return (bits & 0x7fff) > (type == RowType::kBFloat16 ? 0x7f80u : 0x7c00u);
}

struct Format {
  const char* name;
  std::vector<ScalesLayout> layouts;
  int64_t block_size, scale_bytes, code_bits;
};

const std::vector<Format>& Formats() {
  static const std::vector<Format> formats = {
      {"plain", {ScalesLayout::kNone}, 1, 0, 0},
      {"blockwise_fp8", {ScalesLayout::kTransposed, ScalesLayout::kRowMajor}, 128, 4, 8},
      {"mxfp8", {ScalesLayout::kAtoms, ScalesLayout::kRowMajor}, 32, 1, 8},
      {"mxfp4", {ScalesLayout::kAtoms, ScalesLayout::kRowMajor}, 32, 1, 4},
      {"nvfp4", {ScalesLayout::kAtoms, ScalesLayout::kRowMajor}, 16, 1, 4},
  };
  return formats;
}

// One set of operands, on host and device.
struct Case {
  std::string name;
  SiluCall call;  // all but the pointers
  std::vector<uint8_t> x;
  std::vector<uint32_t> row_offsets;
  std::vector<uint32_t> given_row_offsets;  // to the GPU, if not the same
  std::vector<float> input_scales;
  int64_t out_row_bytes;
  int64_t scales_bytes;
};

template <class T>
std::vector<uint8_t> ToBytes(const std::vector<T>& values) {
  const auto* const begin = reinterpret_cast<const uint8_t*>(values.data());
  return {begin, begin + values.size() * sizeof(T)};
}

void CompareOut(const Case& test, const std::vector<uint8_t>& got,
                const std::vector<uint8_t>& wanted) {
  const bool is_plain = test.call.scales_layout == ScalesLayout::kNone;
  const int64_t step = is_plain ? Bytes(test.call.out_type) : 1;
  for (size_t i = 0; i < wanted.size(); i += step) {
    if (std::memcmp(&got[i], &wanted[i], step) == 0) continue;
    if (is_plain && IsNan(&got[i], test.call.out_type) && IsNan(&wanted[i], test.call.out_type)) {
      continue;
    }
    const int64_t row = i / test.out_row_bytes, in_row = i % test.out_row_bytes;
    CHECK_EQ(test.name + ": row " + std::to_string(row) + ", byte " + std::to_string(in_row) +
                 ": " + std::to_string(got[i]),
             std::to_string(wanted[i]));
  }
}

// Everything is compared, what must not be written, too.
void Run(Case& test) {
  const SiluCall& sizes = test.call;
  std::vector<uint8_t> out(sizes.n_rows * test.out_row_bytes, kUntouched);
  std::vector<uint8_t> scales(test.scales_bytes, kUntouched);
  const bool is_given = !test.given_row_offsets.empty();
  const OnDevice x(test.x),
      row_offsets(ToBytes(is_given ? test.given_row_offsets : test.row_offsets));
  const OnDevice input_scales(ToBytes(test.input_scales)), device_out(out), device_scales(scales);

  SiluCall call = test.call;
  call.x = x.data;
  call.row_offsets = static_cast<const uint32_t*>(row_offsets.data);
  call.input_scales =
      test.input_scales.empty() ? nullptr : static_cast<const float*>(input_scales.data);
  call.out = device_out.data;
  call.scales = device_scales.data;
  CHECK_EQ(LaunchFusedSilu(call, nullptr), cudaSuccess);
  CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);

  call.x = test.x.data();
  call.row_offsets = test.row_offsets.data();
  call.input_scales = test.input_scales.empty() ? nullptr : test.input_scales.data();
  call.out = out.data();
  call.scales = scales.data();
  const Status status = FusedSilu(Pool{}, call);
  CHECK_EQ(status.message, "");
  CompareOut(test, device_out.Read(), out);
  const std::vector<uint8_t> got = device_scales.Read();
  for (size_t i = 0; i < scales.size(); ++i) {
    if (got[i] != scales[i]) CHECK_EQ(test.name + ": scales differ at " + std::to_string(i), "");
  }
}

// Numbers of all magnitudes; of those that occur; all bfloat16 as gates.
enum class Numbers { kBits, kUsual, kEveryGate };

uint32_t DrawBits(std::mt19937& random, Numbers numbers, bool is_gate, uint32_t index) {
  const uint32_t bits = random();
  if (numbers == Numbers::kEveryGate && is_gate) return index << 16;
  if (numbers == Numbers::kBits) return bits;
  return (bits & 0x807fffff) | ((122 + bits % 8) << 23);  // 2^-5 to 2^2
}

template <class T>
void FillX(Case& test, Numbers numbers) {
  std::mt19937 random(static_cast<uint32_t>(test.call.row_size));
  std::vector<T> x(test.call.n_rows * 2 * test.call.row_size);
  const int64_t size = test.call.row_size;
  for (int64_t row = 0; row < test.call.n_rows; ++row) {
    for (int64_t column = 0; column < 2 * size; ++column) {
      const bool is_gate = test.call.is_interleaved ? column % 2 == 0 : column < size;
      const int64_t of_gate = test.call.is_interleaved ? column / 2 : column % size;
      const auto index = static_cast<uint32_t>(row * size + of_gate) & 0xffff;
      const uint32_t bits = DrawBits(random, numbers, is_gate, index);
      T& value = x[row * 2 * size + column];
      if constexpr (std::is_same_v<T, Float16>) {
        value.bits = numbers == Numbers::kBits ? static_cast<uint16_t>(bits)
                                               : FromFloat<Float16>(FloatFromBits(bits)).bits;
      } else if constexpr (std::is_same_v<T, BFloat16>) {
        value.bits = static_cast<uint16_t>(bits >> 16);
      } else {
        value = FloatFromBits(bits);
      }
    }
  }
  test.x = ToBytes(x);
}

void FillX(Case& test, Numbers numbers) {
  if (test.call.x_type == RowType::kBFloat16) return FillX<BFloat16>(test, numbers);
  if (test.call.x_type == RowType::kFloat16) return FillX<Float16>(test, numbers);
  FillX<float>(test, numbers);
}

Case MakeCase(const Format& format, ScalesLayout layout, RowType x_type, int64_t row_size,
              const std::vector<uint32_t>& sizes) {
  Case test{};
  test.row_offsets = {0};
  for (const uint32_t size : sizes) test.row_offsets.push_back(test.row_offsets.back() + size);
  SiluCall& call = test.call;
  call.token_format = format.name;
  call.scales_layout = layout;
  call.n_rows = test.row_offsets.back() + 5;
  call.n_groups = static_cast<int64_t>(sizes.size());
  call.row_size = row_size;
  call.x_type = x_type;
  test.out_row_bytes = row_size * format.code_bits / 8;
  if (layout == ScalesLayout::kNone) return test;
  call.n_scales = row_size / format.block_size;
  test.scales_bytes =
      layout == ScalesLayout::kAtoms
          ? MaxBlocks(call.n_rows, call.n_groups) * AtomsPerRow(call.n_scales) * kAtomBytes
          : call.n_rows * call.n_scales * format.scale_bytes;
  return test;
}

void RunAll(const Format& format, RowType x_type, int64_t row_size,
            const std::vector<uint32_t>& sizes, Numbers numbers,
            const Activation& clamped = {true, 1.702f, 7.0f}) {
  int n_cases = 0;
  for (const ScalesLayout layout : format.layouts) {
    for (int variant = 0; variant < 4; ++variant) {
      Case test = MakeCase(format, layout, x_type, row_size, sizes);
      test.call.is_interleaved = variant % 2 == 1;
      test.call.activation = clamped;
      test.call.activation.is_clamped = variant / 2 == 1;
      test.name = std::string(format.name) + ", layout " +
                  std::to_string(static_cast<int>(layout)) + ", x type " +
                  std::to_string(static_cast<int>(x_type)) + ", variant " + std::to_string(variant);
      if (test.call.token_format == "nvfp4" && variant > 0) {
        for (size_t i = 0; i < sizes.size(); ++i) {
          const float some[] = {1.0f, 0.3f, 40.0f, 1e-38f, 0.0f, 3e38f};
          test.input_scales.push_back(some[i % 6]);
        }
      }
      FillX(test, numbers);
      if (layout != ScalesLayout::kNone) {
        Run(test);
        ++n_cases;
        continue;
      }
      for (const RowType type : {RowType::kBFloat16, RowType::kFloat16, RowType::kFloat32}) {
        test.call.out_type = type;
        test.out_row_bytes = row_size * Bytes(type);
        Run(test);
        ++n_cases;
      }
    }
  }
  std::cout << format.name << ", x type " << static_cast<int>(x_type) << ", " << row_size
            << " columns: " << n_cases << " cases" << std::endl;
}

// Offsets beyond the rows that there are stand for their number.
void RunBeyond(const Format& format) {
  for (const ScalesLayout layout : format.layouts) {
    Case test = MakeCase(format, layout, RowType::kBFloat16, 512, {40, 65, 0, 30});
    test.name = std::string(format.name) + ", offsets beyond the rows";
    if (layout == ScalesLayout::kNone) test.out_row_bytes = 512 * Bytes(test.call.out_type);
    test.call.n_rows = 100;
    test.given_row_offsets = test.row_offsets;
    for (uint32_t& offset : test.row_offsets) offset = std::min(offset, 100u);
    FillX(test, Numbers::kUsual);
    Run(test);
  }
}

// Where row_offsets do not rise from 0 and groups matter, nothing is written.
void RunUnordered(const Format& format) {
  if (format.layouts[0] != ScalesLayout::kAtoms) return;
  for (const std::vector<uint32_t>& given :
       {std::vector<uint32_t>{1, 40, 100}, {0, 90, 40}, {0, 4000000000, 130}, {7, 7, 7}}) {
    Case test = MakeCase(format, ScalesLayout::kAtoms, RowType::kBFloat16, 512, {40, 90});
    test.name = std::string(format.name) + ", offsets that do not rise from 0";
    test.row_offsets = {0, 0, 0};
    test.given_row_offsets = given;
    FillX(test, Numbers::kUsual);
    Run(test);
  }
}

// A graph that writes x and runs fused_silu twice, each right behind what precedes it: twice.
void RunCaptured(const Format& format) {
  Case test = MakeCase(format, format.layouts[0], RowType::kBFloat16, 2048, {900, 0, 130});
  const bool is_plain = format.layouts[0] == ScalesLayout::kNone;
  if (is_plain) test.out_row_bytes = 2048 * Bytes(test.call.out_type);
  test.name = std::string(format.name) + ", captured";
  FillX(test, Numbers::kUsual);
  SiluCall call = test.call;
  std::vector<uint8_t> out(call.n_rows * test.out_row_bytes), scales(test.scales_bytes);
  call.x = test.x.data();
  call.row_offsets = test.row_offsets.data();
  call.out = out.data();
  call.scales = scales.data();
  CHECK_EQ(FusedSilu(Pool{}, call).message, "");

  const OnDevice source(test.x), row_offsets(ToBytes(test.row_offsets));
  const OnDevice x(std::vector<uint8_t>(test.x.size())), device_out(out), device_scales(scales);
  cudaMemset(device_out.data, 0, device_out.size);
  cudaMemset(device_scales.data, 0, device_scales.size);
  call.x = x.data;
  call.row_offsets = static_cast<const uint32_t*>(row_offsets.data);
  call.out = device_out.data;
  call.scales = device_scales.data;
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t runnable;
  CHECK_EQ(cudaStreamCreate(&stream), cudaSuccess);
  CHECK_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  CopyKernel<<<64, 256, 0, stream>>>(static_cast<const int4*>(source.data),
                                     static_cast<int4*>(x.data), source.size / sizeof(int4));
  for (int i = 0; i < 2; ++i) CHECK_EQ(LaunchFusedSilu(call, stream), cudaSuccess);
  CHECK_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  CHECK_EQ(cudaGraphInstantiate(&runnable, graph, 0), cudaSuccess);
  for (int replay = 0; replay < 2; ++replay) {
    cudaMemsetAsync(x.data, 0, x.size, stream);
    CHECK_EQ(cudaGraphLaunch(runnable, stream), cudaSuccess);
    CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    const std::vector<uint8_t> got = device_out.Read(), got_scales = device_scales.Read();
    const int64_t n_used = test.row_offsets.back();
    CHECK_EQ(std::equal(got.begin(), got.begin() + n_used * test.out_row_bytes, out.begin()), true);
    CHECK_EQ(got_scales == scales, true);
  }
  cudaGraphExecDestroy(runnable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

void TestBits() {
  for (const Format& format : Formats()) {
    for (const RowType type : {RowType::kBFloat16, RowType::kFloat16, RowType::kFloat32}) {
      for (const Numbers numbers : {Numbers::kBits, Numbers::kUsual}) {
        RunAll(format, type, 1408, {3, 0, 140, 9, 0, 128}, numbers);
        RunAll(format, type, 256, {0, 5}, numbers);
      }
    }
    RunAll(format, RowType::kBFloat16, 2048, {64}, Numbers::kEveryGate);
    RunAll(format, RowType::kFloat32, 2048, {64}, Numbers::kEveryGate);
    RunAll(format, RowType::kBFloat16, 512, {0, 0}, Numbers::kUsual);
    RunAll(format, RowType::kBFloat16, 1920, std::vector<uint32_t>(300, 1), Numbers::kUsual);
    // 1342 groups are the last to need no more shared memory than any kernel has.
    for (const size_t n_groups : {size_t{1342}, size_t{1343}, size_t{kMostSiluGroups}}) {
      RunAll(format, RowType::kBFloat16, 256, std::vector<uint32_t>(n_groups, 1), Numbers::kUsual);
    }
    for (const auto& [alpha, limit] :
         {std::pair{-0.5f, 0.0f}, std::pair{1e30f, 3e38f}, std::pair{0.0f, 1e-3f}}) {
      RunAll(format, RowType::kBFloat16, 2048, {64}, Numbers::kEveryGate, {true, alpha, limit});
      RunAll(format, RowType::kFloat32, 256, {0, 5}, Numbers::kBits, {true, alpha, limit});
    }
    // More rows than warps have columns: rounds of pieces, and rows that are dealt out after them.
    RunAll(format, RowType::kBFloat16, 512, {5000, 0, 1, 4999, 3}, Numbers::kUsual);
    RunAll(format, RowType::kBFloat16, 1024, {700, 4000, 130}, Numbers::kBits);
    RunAll(format, RowType::kFloat32, 768, {2100, 2900}, Numbers::kUsual);
    RunBeyond(format);
    RunUnordered(format);
    RunCaptured(format);
  }
  RunAll(Formats()[0], RowType::kBFloat16, 13, {3, 4}, Numbers::kUsual);
  RunAll(Formats()[0], RowType::kFloat32, 6, {3, 4}, Numbers::kBits);
  RunAll(Formats()[0], RowType::kFloat16, 1, {700}, Numbers::kUsual);
}

}  // namespace
}  // namespace jax_ep::p2p

int main(int argc, char** argv) {
  using namespace jax_ep::p2p;
  int n_devices = 0;
  if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
    std::cout << "silu_test: no GPU" << std::endl;
    return 1;
  }
  CHECK_EQ(PrepareFusedSilu(), cudaSuccess);
  if (argc < 2 || std::string(argv[1]) != "speed") {
    TestParts();
    TestBits();
    std::cout << "silu_test: all bits are the host's" << std::endl;
  }
  Speed().Run();
}
