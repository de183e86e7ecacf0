// Times the kernels for gradients in FP8 (layer/matmul/fp8_gradient.h): rows quantized along rows
// and columns, codes along columns, and the gradient of weights from codes, to bfloat16, to float32
// and added to float32, beside the one from bfloat16.
//
//   fp8_gradient_probe ["DeepSeek-V3 up": of this model only]

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <vector>

#include "layer/matmul/fp8_gradient.h"
#include "layer/matmul/kernels.h"
#include "tests/bench/matmul_timing.cuh"
#include "tests/unit/matmul_case.cuh"

namespace jax_ep::matmul {
namespace {

constexpr Model kModels[] = {
    {"DeepSeek-V3 up", 64, 7168, 4096}, {"DeepSeek-V3 down", 64, 2048, 7168},
    {"DeepSeek-V3 up", 32, 7168, 4096}, {"Qwen3-30B up", 64, 2048, 1536},
    {"Qwen3-30B down", 64, 768, 2048},  {"Mixtral up", 8, 4096, 28672},
    {"Mixtral down", 8, 14336, 4096}};
constexpr uint32_t kMeans[] = {64, 128, 256, 512, 1024};
constexpr uint32_t kLargestMean = 1024;

// Rows [C, n] of normal numbers, and their codes.
struct Rows {
  Rows(const Model& model, int64_t size, uint32_t seed)
      : n(size),
        numbers(NumRows(model) * n * 2),
        codes(NumRows(model) * n),
        scales(NumRows(model) * n / kMatmulScaleBlock * 4),
        column_codes(NumBlocks(model) * kMatmulScaleBlock * n),
        column_scales(NumBlocks(model) * n * 4) {
    FillNormal<<<kTestBlocks, kTestThreads>>>(numbers.As<__nv_bfloat16>(), NumRows(model) * n,
                                              seed);
    ExpectSuccess("FillNormal", cudaDeviceSynchronize());
  }
  static int64_t NumRows(const Model& model) { return int64_t{model.n_groups} * kLargestMean; }
  static int64_t NumBlocks(const Model& model) {
    return MaxRowBlocks(NumRows(model), model.n_groups);
  }

  RowCodes AlongRows() const { return {codes.As<uint8_t>(), scales.As<float>()}; }
  RowCodes AlongColumns() const { return {column_codes.As<uint8_t>(), column_scales.As<float>()}; }

  const int64_t n;
  const Buffer numbers, codes, scales, column_codes, column_scales;
};

struct Operands {
  explicit Operands(const Model& model)
      : lhs(model, model.k, 1),
        rhs(model, model.n, 2),
        out(4 * model.n_groups * model.k * model.n),
        workspace(MatmulWorkspaceBytes(model.n_groups)) {
    ExpectSuccess("cudaMemset", cudaMemset(out.As<void>(), 0, out.size()));
  }

  const Rows lhs, rhs;
  const Buffer out, workspace;
};

class Timing {
 public:
  Timing(const Model& model, const Operands& operands, const std::vector<uint32_t>& offsets)
      : model_(model),
        operands_(operands),
        n_rows_(offsets.back()),
        row_offsets_(offsets.size() * sizeof(uint32_t)) {
    ExpectSuccess("cudaMemcpy", cudaMemcpy(row_offsets_.As<void>(), offsets.data(),
                                           row_offsets_.size(), cudaMemcpyDefault));
  }

  // Of cotangents, which both gradients need, and of rows, which are codes.
  void QuantizeNumbers() const {
    QuantizeCall call = CallOf(operands_.rhs);
    call.rows = operands_.rhs.numbers.As<void>();
    call.along_rows = operands_.rhs.AlongRows();
    ExpectSuccess("numbers", hopper::LaunchQuantizeRows(call, kTimedStream));
  }
  void QuantizeCodes() const {
    QuantizeCall call = CallOf(operands_.lhs);
    call.rows = operands_.lhs.codes.As<void>(), call.scales = operands_.lhs.scales.As<float>();
    ExpectSuccess("codes", hopper::LaunchQuantizeRows(call, kTimedStream));
  }
  // Makes codes along rows, which the above reads.
  void Prepare() const {
    QuantizeCall call = CallOf(operands_.lhs);
    call.rows = operands_.lhs.numbers.As<void>();
    call.along_rows = operands_.lhs.AlongRows();
    ExpectSuccess("numbers", hopper::LaunchQuantizeRows(call, kTimedStream));
    QuantizeNumbers();
    QuantizeCodes();
    ExpectSuccess("codes", cudaStreamSynchronize(kTimedStream));
  }

  void MultiplyNumbers(RowType out_type, bool accumulates) const {
    MatmulCall call = Multiplication(Element::kBFloat16, out_type, accumulates);
    call.n_rows = n_rows_;
    call.lhs = operands_.lhs.numbers.As<void>(), call.rhs = operands_.rhs.numbers.As<void>();
    ExpectSuccess("bfloat16", hopper::LaunchWeightGradient(call, kTimedStream));
  }
  void MultiplyCodes(RowType out_type, bool accumulates) const {
    MatmulCall call = Multiplication(Element::kE4m3, out_type, accumulates);
    call.n_rows = MaxRowBlocks(n_rows_, model_.n_groups) * kMatmulScaleBlock;
    const RowCodes lhs = operands_.lhs.AlongColumns(), rhs = operands_.rhs.AlongColumns();
    call.lhs = lhs.codes, call.rhs = rhs.codes;
    call.lhs_scales = lhs.scales, call.rhs_scales = rhs.scales;
    ExpectSuccess("codes", hopper::LaunchCodesGradient(call, kTimedStream));
  }

 private:
  QuantizeCall CallOf(const Rows& rows) const {
    QuantizeCall call{};
    call.n_rows = n_rows_, call.n_groups = model_.n_groups, call.n = rows.n;
    call.row_offsets = row_offsets_.As<uint32_t>();
    call.along_columns = rows.AlongColumns();
    return call;
  }

  MatmulCall Multiplication(Element element, RowType out_type, bool accumulates) const {
    MatmulCall call{};
    call.form = MatmulForm::kRows, call.element = element, call.out_type = out_type;
    call.accumulates = accumulates;
    call.n_groups = model_.n_groups, call.k = model_.k, call.n = model_.n;
    call.row_offsets = row_offsets_.As<uint32_t>(), call.out = operands_.out.As<void>();
    call.workspace = operands_.workspace.As<void>();
    call.workspace_bytes = operands_.workspace.size();
    return call;
  }

  const Model& model_;
  const Operands& operands_;
  const int64_t n_rows_;
  const Buffer row_offsets_;
};

void TimeCase(const Model& model, const Operands& operands, uint32_t mean, bool is_drawn) {
  const Timing timing(model, operands, DrawOffsets(model.n_groups, mean, is_drawn));
  timing.Prepare();
  const std::vector<double> ms =
      TimeRoundRobin({[&](int) { timing.QuantizeNumbers(); }, [&](int) { timing.QuantizeCodes(); },
                      [&](int) { timing.MultiplyNumbers(RowType::kBFloat16, false); },
                      [&](int) { timing.MultiplyNumbers(RowType::kFloat32, true); },
                      [&](int) { timing.MultiplyCodes(RowType::kBFloat16, false); },
                      [&](int) { timing.MultiplyCodes(RowType::kFloat32, false); },
                      [&](int) { timing.MultiplyCodes(RowType::kFloat32, true); }});
  std::printf(
      "{\"model\": \"%s\", \"n_groups\": %u, \"mean\": %u, \"groups\": \"%s\", "
      "\"quantize_numbers_ms\": %.4f, \"quantize_codes_ms\": %.4f, \"bfloat16_ms\": %.4f, "
      "\"bfloat16_adds_ms\": %.4f, \"codes_ms\": %.4f, \"codes_float32_ms\": %.4f, "
      "\"codes_add_ms\": %.4f}\n",
      model.name, model.n_groups, mean, is_drawn ? "random" : "equal", ms[0], ms[1], ms[2], ms[3],
      ms[4], ms[5], ms[6]);
  std::fflush(stdout);
}

}  // namespace
}  // namespace jax_ep::matmul

int main(int n_args, char** args) {
  using namespace jax_ep::matmul;
  ForEachCase<Operands>(kModels, kMeans, n_args, args, TimeCase);
}
