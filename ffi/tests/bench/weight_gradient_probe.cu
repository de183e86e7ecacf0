// Times the kernel for the gradients of weights (layer/matmul/hopper/weight_gradient.cuh) beside
// CUTLASS's and one dense matmul of cuBLAS with as many operations. "adds": to float32, instead of
// bfloat16.
//
//   weight_gradient_probe FOLDER_OF_LIBCUBLAS

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <vector>

#include "layer/matmul/hopper/hopper.cuh"
#include "tests/bench/dense_matmul.h"
#include "tests/bench/matmul_timing.cuh"
#include "tests/unit/matmul_case.cuh"

namespace jax_ep::matmul {
namespace {

constexpr Model kModels[] = {
    {"DeepSeek-V3 up", 32, 7168, 4096}, {"DeepSeek-V3 down", 32, 2048, 7168},
    {"Qwen3-30B up", 64, 2048, 1536},   {"Qwen3-30B down", 64, 768, 2048},
    {"Mixtral up", 8, 4096, 28672},     {"Mixtral down", 8, 14336, 4096}};
constexpr uint32_t kMeans[] = {64, 128, 256, 512, 1024};

cudaError_t LaunchCutlass(const MatmulCall& call) {
  using hopper::AlongRows;
  using BFloat16 = cutlass::bfloat16_t;
  constexpr auto kForm = MatmulForm::kRows;
  return hopper::Launch<kForm, hopper::PlainKernel<BFloat16, BFloat16, kForm, AlongRows>::Type>(
      call, kTimedStream);
}

// Operands of a model with as many rows as any case has. `rhs` and `out` also serve a dense matmul.
struct Operands {
  using Pointer = std::unique_ptr<Buffer>;

  explicit Operands(const Model& model)
      : sums(4 * model.n_groups * model.k * model.n),
        workspace(MatmulWorkspaceBytes(model.n_groups)) {
    ExpectSuccess("cudaMemset", cudaMemset(sums.As<void>(), 0, sums.size()));
    const int64_t n_rows = int64_t{model.n_groups} * kMeans[std::size(kMeans) - 1];
    const int64_t matrix = model.k * model.n;
    for (uint32_t set = 0; set < kSets; ++set) {
      lhs.push_back(MakeNormal(n_rows * model.k, 2 * set));
      rhs.push_back(MakeNormal(std::max(n_rows * model.n, matrix), 2 * set + 1));
      out.push_back(
          std::make_unique<Buffer>(2 * std::max(n_rows * model.n, model.n_groups * matrix)));
    }
  }

  static Pointer MakeNormal(int64_t size, uint32_t seed) {
    auto buffer = std::make_unique<Buffer>(size * 2);
    FillNormal<<<kTestBlocks, kTestThreads>>>(buffer->As<__nv_bfloat16>(), size, seed);
    ExpectSuccess("FillNormal", cudaDeviceSynchronize());
    return buffer;
  }

  std::vector<Pointer> lhs, rhs, out;
  const Buffer sums, workspace;
};

// Bytes per millisecond of a copy, read and written.
double CopyRate(const Buffer& memory) {
  const size_t n_bytes = memory.size() / 2;
  const double ms = TimeChain([&](int) {
    ExpectSuccess("cudaMemcpyAsync", cudaMemcpyAsync(memory.As<char>() + n_bytes, memory.As<char>(),
                                                     n_bytes, cudaMemcpyDeviceToDevice));
  });
  return 2 * static_cast<double>(n_bytes) / ms;
}

void TimeCase(const Model& model, const Operands& operands, uint32_t mean, bool is_drawn,
              const DenseMatmul& dense, double copy_rate) {
  const std::vector<uint32_t> offsets = DrawOffsets(model.n_groups, mean, is_drawn);
  const Buffer row_offsets(offsets.size() * sizeof(uint32_t));
  ExpectSuccess("cudaMemcpy", cudaMemcpy(row_offsets.As<void>(), offsets.data(), row_offsets.size(),
                                         cudaMemcpyDefault));
  const int64_t n_rows = offsets.back();
  const auto call = [&](int set) {
    MatmulCall one{};
    one.form = MatmulForm::kRows, one.element = Element::kBFloat16;
    one.out_type = RowType::kBFloat16;
    one.n_rows = n_rows, one.n_groups = model.n_groups, one.k = model.k, one.n = model.n;
    one.lhs = operands.lhs[set]->As<void>(), one.rhs = operands.rhs[set]->As<void>();
    one.row_offsets = row_offsets.As<uint32_t>(), one.out = operands.out[set]->As<void>();
    one.workspace = operands.workspace.As<void>();
    one.workspace_bytes = operands.workspace.size();
    return one;
  };
  const std::vector<double> ms = TimeRoundRobin(
      {[&](int set) {
         const MatmulCall one = call(set);
         dense.Run(one.lhs, one.rhs, one.out, static_cast<int>(n_rows), static_cast<int>(one.k),
                   static_cast<int>(one.n), /*is_transposed=*/false);
       },
       [&](int set) { ExpectSuccess("CUTLASS", LaunchCutlass(call(set))); },
       [&](int set) {
         ExpectSuccess("own", hopper::LaunchWeightGradient(call(set), kTimedStream));
       },
       [&](int set) {
         MatmulCall one = call(set);
         one.accumulates = true, one.out_type = RowType::kFloat32;
         one.out = operands.sums.As<void>();
         ExpectSuccess("adds", hopper::LaunchWeightGradient(one, kTimedStream));
       }});
  const int64_t n_elements = model.n_groups * model.k * model.n + n_rows * (model.k + model.n);
  const double bytes_ms = 2 * static_cast<double>(n_elements) / copy_rate;
  const double limit = std::max(bytes_ms, ms[0]);
  std::printf(
      "%-16s %4u %-11s bytes %6.3f dense %6.3f | CUTLASS %6.3f %.2f | own %6.3f %.2f | adds "
      "%6.3f\n",
      model.name, mean, is_drawn ? "multinomial" : "equal", bytes_ms, ms[0], ms[1], ms[1] / limit,
      ms[2], ms[2] / limit, ms[3]);
  std::fflush(stdout);
}

void TimeAll(const char* cublas_dir) {
  const DenseMatmul dense(cublas_dir, kTimedStream);
  double copy_rate = 0;
  for (const Model& model : kModels) {
    const Operands operands(model);
    if (copy_rate == 0) {
      copy_rate = CopyRate(*operands.out[0]);
      std::printf("copy: %.2f TB/s; ms, and shares of the larger limit\n", copy_rate * 1e-9);
    }
    for (const bool is_drawn : {false, true}) {
      for (const uint32_t mean : kMeans) {
        TimeCase(model, operands, mean, is_drawn, dense, copy_rate);
      }
    }
  }
}

}  // namespace
}  // namespace jax_ep::matmul

int main(int argc, char** argv) {
  CHECK_EQ(argc, 2);
  jax_ep::matmul::TimeAll(argv[1]);
}
