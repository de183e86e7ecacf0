// Tests of fused_silu on a GPU: compared in bits with the host's; then its benchmark. The argument
// `speed` runs only the benchmark.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <iostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/formats.h"
#include "layer/activation/cpu_silu.h"
#include "layer/activation/cuda_silu.h"
#include "tests/bench/silu_bench.cuh"
#include "tests/p2p/p2p_memory.h"
#include "tests/unit/check.h"

namespace jax_ep::silu {
namespace {

using Bytes = std::vector<uint8_t>;
constexpr uint8_t kUntouched = 0xee;

// Whether the element at `at` is NaN, whose bits are unspecified.
bool IsNan(const uint8_t* at, RowType type) {
  uint32_t bits = 0;
  std::memcpy(&bits, at, ElementBytes(type));
  if (type == RowType::kFloat32) return (bits & 0x7fffffff) > 0x7f800000;
  return (bits & 0x7fff) > (type == RowType::kBFloat16 ? 0x7f80u : 0x7c00u);
}

struct Results {
  Bytes out, scales;
};

// The operands of a call on the host.
struct Case {
  std::string name;
  SiluCall call;  // without pointers
  Bytes x;
  std::vector<uint32_t> row_offsets;
  std::vector<uint32_t> device_row_offsets;  // if the GPU gets others
  std::vector<float> input_scales;
  int64_t out_row_bytes, scales_bytes;

  Results Untouched() const {
    return {Bytes(call.n_rows * out_row_bytes, kUntouched), Bytes(scales_bytes, kUntouched)};
  }
  Results OnHost() const {
    Results results = Untouched();
    SiluCall host = call;
    host.x = x.data();
    host.row_offsets = row_offsets.data();
    host.input_scales = input_scales.empty() ? nullptr : input_scales.data();
    host.out = results.out.data();
    host.scales = results.scales.data();
    CHECK_EQ(FusedSilu(host::Pool{}, host).message, "");
    return results;
  }
};

// A case's operands and results on the GPU.
struct DeviceCase {
  const DeviceArray<uint8_t> x, out, scales;
  const DeviceArray<uint32_t> row_offsets;
  const DeviceArray<float> input_scales;
  SiluCall call;

  explicit DeviceCase(const Case& test)
      : x(OnDevice(test.x)),
        out(OnDevice(test.Untouched().out)),
        scales(OnDevice(test.Untouched().scales)),
        row_offsets(
            OnDevice(test.device_row_offsets.empty() ? test.row_offsets : test.device_row_offsets)),
        input_scales(OnDevice(test.input_scales)),
        call(test.call) {
    call.x = x.get();
    call.row_offsets = row_offsets.get();
    if (!test.input_scales.empty()) call.input_scales = input_scales.get();
    call.out = out.get();
    call.scales = scales.get();
  }

  void Launch(cudaStream_t stream) const { CHECK_CUDA(LaunchFusedSilu(call, stream)); }
};

void CompareOut(const Case& test, const Bytes& got, const Bytes& wanted) {
  const bool is_plain = test.call.scales_layout == ScalesLayout::kNone;
  const RowType type = test.call.out_type;
  const int64_t step = is_plain ? ElementBytes(type) : 1;
  for (size_t i = 0; i < wanted.size(); i += step) {
    if (std::memcmp(&got[i], &wanted[i], step) == 0) continue;
    if (is_plain && IsNan(&got[i], type) && IsNan(&wanted[i], type)) continue;
    const int64_t row = i / test.out_row_bytes, in_row = i % test.out_row_bytes;
    CHECK_EQ(test.name + ": row " + std::to_string(row) + ", byte " + std::to_string(in_row) +
                 ": " + std::to_string(got[i]),
             std::to_string(wanted[i]));
  }
}

// Compares all of the results, including what must not be written.
void Run(const Case& test) {
  const DeviceCase device(test);
  device.Launch(nullptr);
  CHECK_CUDA(cudaDeviceSynchronize());
  const Results wanted = test.OnHost();
  CompareOut(test, device.out.Read(), wanted.out);
  const Bytes scales = device.scales.Read();
  const auto at = std::mismatch(scales.begin(), scales.end(), wanted.scales.begin()).first;
  if (at == scales.end()) return;
  CHECK_EQ(test.name + ": scales differ at " + std::to_string(at - scales.begin()), "");
}

// Numbers of all magnitudes; of magnitudes that occur in practice; every bfloat16 as a gate.
enum class Numbers { kBits, kPractical, kEveryGate };

uint32_t DrawBits(std::mt19937& random, Numbers numbers, bool is_gate, uint32_t index) {
  const uint32_t bits = random();
  if (numbers == Numbers::kEveryGate && is_gate) return index << 16;
  if (numbers == Numbers::kBits) return bits;
  return (bits & 0x807fffff) | ((122 + bits % 8) << 23);  // 2^-5 to 2^2
}

void FillX(Case& test, Numbers numbers) {
  std::mt19937 random(static_cast<uint32_t>(test.call.row_size));
  const RowType type = test.call.x_type;
  const int64_t size = test.call.row_size, bytes = ElementBytes(type);
  test.x.resize(test.call.n_rows * 2 * size * bytes);
  for (int64_t i = 0; i < test.call.n_rows * 2 * size; ++i) {
    const int64_t row = i / (2 * size), column = i % (2 * size);
    const bool is_gate = test.call.is_interleaved ? column % 2 == 0 : column < size;
    const int64_t of_gate = test.call.is_interleaved ? column / 2 : column % size;
    const auto index = static_cast<uint32_t>(row * size + of_gate) & 0xffff;
    uint32_t bits = DrawBits(random, numbers, is_gate, index);
    if (type == RowType::kBFloat16) bits >>= 16;
    if (type == RowType::kFloat16 && numbers != Numbers::kBits) {
      bits = FromFloat<Float16>(FloatFromBits(bits)).bits;
    }
    std::memcpy(&test.x[i * bytes], &bits, bytes);
  }
}

// The format whose result is plain rows of out_type.
const TokenFormat& PlainFormat() { return *FindTokenFormat("plain_float32"); }

void SetOutType(Case& test, RowType type) {
  test.call.out_type = type;
  test.out_row_bytes = test.call.row_size * ElementBytes(type);
}

Case MakeCase(const TokenFormat& format, ScalesLayout layout, RowType x_type, int64_t row_size,
              const std::vector<uint32_t>& sizes, int64_t n_rows = 0) {
  Case test{};
  test.row_offsets = {0};
  for (const uint32_t size : sizes) test.row_offsets.push_back(test.row_offsets.back() + size);
  SiluCall& call = test.call;
  call.token_format = format.name;
  call.scales_layout = layout;
  call.n_rows = n_rows > 0 ? n_rows : test.row_offsets.back() + 5;
  call.n_groups = static_cast<int64_t>(sizes.size());
  call.row_size = row_size;
  call.n_scales = format.n_scales(row_size);
  call.x_type = x_type;
  test.out_row_bytes = format.payload_bytes(row_size);
  if (format.is_plain()) SetOutType(test, RowType::kBFloat16);
  test.scales_bytes =
      format.is_plain()
          ? 0
          : ScalesShape(layout, call.n_rows, call.n_scales, call.n_groups).n_elements() *
                format.scale_bytes();
  return test;
}

// The layouts of a format; kNone once if it is plain.
std::vector<ScalesLayout> LayoutsOf(const TokenFormat& format) {
  if (format.is_plain()) return {ScalesLayout::kNone};
  return {format.layouts.begin(), format.layouts.end()};
}

// Runs a case in every type of its result; returns how many there are.
int RunOutTypes(Case& test) {
  if (test.call.scales_layout != ScalesLayout::kNone) {
    Run(test);
    return 1;
  }
  for (const RowType type : {RowType::kBFloat16, RowType::kFloat16, RowType::kFloat32}) {
    SetOutType(test, type);
    Run(test);
  }
  return 3;
}

void RunAll(const TokenFormat& format, RowType x_type, int64_t row_size,
            const std::vector<uint32_t>& sizes, Numbers numbers,
            const Activation& clamped = {true, 1.702f, 7.0f}) {
  int n_cases = 0;
  for (const ScalesLayout layout : LayoutsOf(format)) {
    for (int variant = 0; variant < 4; ++variant) {
      Case test = MakeCase(format, layout, x_type, row_size, sizes);
      test.call.is_interleaved = variant % 2 == 1;
      test.call.activation = clamped;
      test.call.activation.is_clamped = variant / 2 == 1;
      test.name = std::string(format.name) + ", layout " + std::string(Name(layout)) + ", x type " +
                  std::to_string(static_cast<int>(x_type)) + ", variant " + std::to_string(variant);
      if (format.takes_input_scale && variant > 0) {
        for (size_t i = 0; i < sizes.size(); ++i) {
          const float some[] = {1.0f, 0.3f, 40.0f, 1e-38f, 0.0f, 3e38f};
          test.input_scales.push_back(some[i % 6]);
        }
      }
      FillX(test, numbers);
      n_cases += RunOutTypes(test);
    }
  }
  std::cout << format.name << ", x type " << static_cast<int>(x_type) << ", " << row_size
            << " columns: " << n_cases << " cases" << std::endl;
}

// With offsets on the GPU that count as others on the host.
void RunOffsets(const TokenFormat& format, ScalesLayout layout, const std::string& what,
                const std::vector<uint32_t>& given, const std::vector<uint32_t>& counted,
                int64_t n_rows) {
  const std::vector<uint32_t> empty(given.size() - 1);
  Case test = MakeCase(format, layout, RowType::kBFloat16, 512, empty, n_rows);
  test.name = std::string(format.name) + ", " + what;
  test.row_offsets = counted;
  test.device_row_offsets = given;
  FillX(test, Numbers::kPractical);
  Run(test);
}

void RunOddOffsets(const TokenFormat& format) {
  for (const ScalesLayout layout : LayoutsOf(format)) {
    // Those beyond the number of rows count as the number of rows.
    RunOffsets(format, layout, "offsets beyond the rows", {0, 40, 105, 105, 135},
               {0, 40, 100, 100, 100}, 100);
  }
  if (format.layouts[0] != ScalesLayout::kAtoms) return;
  // If groups matter and row_offsets do not rise from 0, nothing is written.
  for (const std::vector<uint32_t>& given :
       {std::vector<uint32_t>{1, 40, 100}, {0, 90, 40}, {0, 4000000000, 130}, {7, 7, 7}}) {
    RunOffsets(format, ScalesLayout::kAtoms, "offsets that do not rise from 0", given, {0, 0, 0},
               135);
  }
}

// Replays a graph that writes x, then runs fused_silu twice, each call right behind what precedes
// it.
void RunCaptured(const TokenFormat& format) {
  Case test = MakeCase(format, LayoutsOf(format)[0], RowType::kBFloat16, 2048, {900, 0, 130});
  test.name = std::string(format.name) + ", captured";
  FillX(test, Numbers::kPractical);
  const Results wanted = test.OnHost();
  const DeviceArray<uint8_t> source = OnDevice(test.x);
  const DeviceCase device(test);
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t runnable;
  CHECK_CUDA(cudaStreamCreate(&stream));
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CopyKernel<<<64, 256, 0, stream>>>(reinterpret_cast<const int4*>(source.get()),
                                     reinterpret_cast<int4*>(device.x.get()),
                                     source.size() / sizeof(int4));
  for (int i = 0; i < 2; ++i) device.Launch(stream);
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&runnable, graph, 0));
  for (int replay = 0; replay < 2; ++replay) {
    CHECK_CUDA(cudaMemsetAsync(device.x.get(), 0, device.x.size(), stream));
    CHECK_CUDA(cudaGraphLaunch(runnable, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    CompareOut(test, device.out.Read(), wanted.out);
    CHECK_EQ(device.scales.Read() == wanted.scales, true);
  }
  cudaGraphExecDestroy(runnable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

void TestFormat(const TokenFormat& format) {
  for (const RowType type : {RowType::kBFloat16, RowType::kFloat16, RowType::kFloat32}) {
    for (const Numbers numbers : {Numbers::kBits, Numbers::kPractical}) {
      RunAll(format, type, 1408, {3, 0, 140, 9, 0, 128}, numbers);
      RunAll(format, type, 256, {0, 5}, numbers);
    }
  }
  RunAll(format, RowType::kBFloat16, 2048, {64}, Numbers::kEveryGate);
  RunAll(format, RowType::kFloat32, 2048, {64}, Numbers::kEveryGate);
  RunAll(format, RowType::kBFloat16, 512, {0, 0}, Numbers::kPractical);
  RunAll(format, RowType::kBFloat16, 1920, std::vector<uint32_t>(300, 1), Numbers::kPractical);
  // 1342 is the most groups that need no more shared memory than the default.
  for (const size_t n_groups : {size_t{1342}, size_t{1343}, size_t{kMaxSiluGroups}}) {
    RunAll(format, RowType::kBFloat16, 256, std::vector<uint32_t>(n_groups, 1),
           Numbers::kPractical);
  }
  for (const auto& [alpha, limit] :
       {std::pair{-0.5f, 0.0f}, std::pair{1e30f, 3e38f}, std::pair{0.0f, 1e-3f}}) {
    RunAll(format, RowType::kBFloat16, 2048, {64}, Numbers::kEveryGate, {true, alpha, limit});
    RunAll(format, RowType::kFloat32, 256, {0, 5}, Numbers::kBits, {true, alpha, limit});
  }
  // Enough rows for rounds of full tiles, with rows left whose chunks are dealt.
  RunAll(format, RowType::kBFloat16, 512, {5000, 0, 1, 4999, 3}, Numbers::kPractical);
  RunAll(format, RowType::kBFloat16, 1024, {700, 4000, 130}, Numbers::kBits);
  RunAll(format, RowType::kFloat32, 768, {2100, 2900}, Numbers::kPractical);
  RunOddOffsets(format);
  RunCaptured(format);
}

void TestBits() {
  TestFormat(PlainFormat());
  for (const TokenFormat& format : kTokenFormats) {
    if (!format.is_plain()) TestFormat(format);
  }
  RunAll(PlainFormat(), RowType::kBFloat16, 13, {3, 4}, Numbers::kPractical);
  RunAll(PlainFormat(), RowType::kFloat32, 6, {3, 4}, Numbers::kBits);
  RunAll(PlainFormat(), RowType::kFloat16, 1, {700}, Numbers::kPractical);
}

}  // namespace
}  // namespace jax_ep::silu

int main(int argc, char** argv) {
  using namespace jax_ep::silu;
  int n_devices = 0;
  if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
    std::cout << "silu_test: no GPU" << std::endl;
    return 1;
  }
  CHECK_CUDA(LoadSiluKernels());
  if (argc < 2 || std::string(argv[1]) != "speed") {
    TestBits();
    std::cout << "silu_test: all bits are the host's" << std::endl;
  }
  SiluBench().Run();
}
