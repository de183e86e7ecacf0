#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/bench/dense_matmul.h"
#include "tests/bench/matmul_probe.h"
#include "tests/bench/matmul_timing.cuh"
#include "tests/unit/matmul_case.cuh"

namespace jax_ep::matmul {
namespace {

// The largest difference, as bits of a float that is not negative.
__global__ void FindDifference(const __nv_bfloat16* a, const __nv_bfloat16* b, int64_t size,
                               unsigned* largest) {
  for (int64_t i = ThreadIndex(); i < size; i += NumThreads()) {
    const float difference = fabsf(__bfloat162float(a[i]) - __bfloat162float(b[i]));
    const unsigned bits = __float_as_uint(difference);  // NaN is above all
    if (bits > *largest) atomicMax(largest, bits);
  }
}

// With the weights of the form: those of a model are not transposed.
Model Of(const Model& model, MatmulForm form) {
  return form == MatmulForm::kWeights ? model : Model{model.name, model.n_groups, model.n, model.k};
}

constexpr Model kModels[] = {
    {"DeepSeek-V3 up", 32, 7168, 4096}, {"DeepSeek-V3 down", 32, 2048, 7168},
    {"Qwen3-30B up", 64, 2048, 1536},   {"Qwen3-30B down", 64, 768, 2048},
    {"Qwen3-30B up", 16, 2048, 1536},   {"Qwen3-30B down", 16, 768, 2048},
    {"Mixtral up", 8, 4096, 28672},     {"Mixtral down", 8, 14336, 4096}};
constexpr uint32_t kMeans[] = {16, 64, 128, 256, 512, 1024};

// Operands of a model with as many rows as any case has.
class Operands {
 public:
  Operands(const Model& model, MatmulForm form) : model_(model), form_(form) {
    const int64_t n_rows = int64_t{model.n_groups} * kMeans[std::size(kMeans) - 1];
    const int64_t n_weights = int64_t{model.n_groups} * model.k * model.n;
    for (int set = 0; set < kSets; ++set) {
      rows_.push_back(MakeNormal(n_rows * model.k, 2 * set));
      weights_.push_back(MakeNormal(n_weights, 2 * set + 1));
      out_.push_back(std::make_unique<Buffer>(n_rows * model.n * 2));
    }
  }

  MatmulCall Call(int set, const Buffer& row_offsets, const Buffer& workspace,
                  int64_t n_rows) const {
    MatmulCall call{};
    call.form = form_, call.element = Element::kBFloat16;
    call.out_type = RowType::kBFloat16;
    call.n_rows = n_rows, call.n_groups = model_.n_groups;
    call.k = model_.k, call.n = model_.n;
    call.lhs = rows_[set]->As<void>(), call.rhs = weights_[set]->As<void>();
    call.row_offsets = row_offsets.As<uint32_t>(), call.out = out_[set]->As<void>();
    call.workspace = workspace.As<void>(), call.workspace_bytes = workspace.size();
    return call;
  }

  const Model& model() const { return model_; }

 private:
  using Pointer = std::unique_ptr<Buffer>;

  static Pointer MakeNormal(int64_t size, uint32_t seed) {
    auto buffer = std::make_unique<Buffer>(size * 2);
    FillNormal<<<kTestBlocks, kTestThreads>>>(buffer->As<__nv_bfloat16>(), size, seed);
    ExpectSuccess("FillNormal", cudaDeviceSynchronize());
    return buffer;
  }

  const Model model_;
  const MatmulForm form_;
  std::vector<Pointer> rows_, weights_, out_;
};

// Bytes per millisecond of a copy, read and written.
double CopyRate(const MatmulCall& call) {
  const size_t n_bytes = call.n_groups * call.k * call.n * 2 / 2;
  auto* const data = static_cast<char*>(const_cast<void*>(call.rhs));
  const double ms = TimeChain([&](int) {
    ExpectSuccess("cudaMemcpyAsync",
                  cudaMemcpyAsync(data + n_bytes, data, n_bytes, cudaMemcpyDeviceToDevice));
  });
  return 2 * static_cast<double>(n_bytes) / ms;
}

// The largest difference of two results, in units of the results' standard deviation.
double Difference(const MatmulCall& call, hopper::Swap swap) {
  const Buffer other(call.out_elements() * 2), largest(sizeof(unsigned));
  MatmulCall cutlass = call;
  cutlass.out = other.As<void>();
  ExpectSuccess("cudaMemset", cudaMemset(call.out, kCanary, other.size()));
  ExpectSuccess("cudaMemset", cudaMemset(largest.As<void>(), 0, sizeof(unsigned)));
  ExpectSuccess("swapped", hopper::LaunchBFloat16(call, kTimedStream, swap));
  ExpectSuccess("CUTLASS", LaunchCutlass(cutlass, kTimedStream));
  FindDifference<<<kTestBlocks, kTestThreads>>>(static_cast<__nv_bfloat16*>(call.out),
                                                other.As<__nv_bfloat16>(), call.out_elements(),
                                                largest.As<unsigned>());
  float difference = 0;
  ExpectSuccess("FindDifference",
                cudaMemcpy(&difference, largest.As<void>(), sizeof(difference), cudaMemcpyDefault));
  return difference / std::sqrt(static_cast<double>(call.k));
}

// `ms`: of the dense matmul, CUTLASS and the others.
void PrintCase(const MatmulCall& call, uint32_t mean, bool is_drawn, const std::vector<double>& ms,
               double copy_rate) {
  const int64_t matrix = call.k * call.n;
  const double flops = 2e-9 * static_cast<double>(call.n_rows * matrix);
  const double n_bytes =
      2 * static_cast<double>(call.n_groups * matrix + call.n_rows * (call.k + call.n));
  std::vector<std::string> names = {"CUTLASS"};
  for (const Probed& probed : kProbed) names.emplace_back(probed.name);
  std::printf("K%lld N%lld L%lld %4u %-11s bytes %6.3f ms, dense %4.0f TF",
              static_cast<long long>(call.k), static_cast<long long>(call.n),
              static_cast<long long>(call.n_groups), mean, is_drawn ? "multinomial" : "equal",
              n_bytes / copy_rate, flops / ms[0]);
  for (size_t i = 1; i < ms.size(); ++i) {
    std::printf(" | %s %6.3f ms %3.0f TF %.2f", names[i - 1].c_str(), ms[i], flops / ms[i],
                ms[0] / ms[i]);
  }
}

void TimeCase(const Operands& operands, uint32_t mean, bool is_drawn, const DenseMatmul* dense,
              double copy_rate) {
  const Model& model = operands.model();
  const std::vector<uint32_t> offsets = DrawOffsets(model.n_groups, mean, is_drawn);
  const int64_t n_rows = offsets.back();
  const std::vector<uint32_t> dense_offsets = {0, offsets.back()};
  const Buffer row_offsets(offsets.size() * sizeof(uint32_t)), one_group(2 * sizeof(uint32_t));
  ExpectSuccess("cudaMemcpy", cudaMemcpy(row_offsets.As<void>(), offsets.data(), row_offsets.size(),
                                         cudaMemcpyDefault));
  ExpectSuccess("cudaMemcpy", cudaMemcpy(one_group.As<void>(), dense_offsets.data(),
                                         one_group.size(), cudaMemcpyDefault));
  const Buffer workspace(MatmulWorkspaceBytes(model.n_groups));
  const auto call = [&](int set) { return operands.Call(set, row_offsets, workspace, n_rows); };
  double difference = 0;
  for (const Probed& probed : kProbed) {
    difference = std::max(difference, Difference(call(0), probed.swap));
  }

  const auto multiply_dense = [&](int set) {
    MatmulCall one = operands.Call(set, one_group, workspace, n_rows);
    one.n_groups = 1;
    if (dense == nullptr) {
      ExpectSuccess("dense", LaunchCutlass(one, kTimedStream));
    } else {
      dense->Run(one.lhs, one.rhs, one.out, static_cast<int>(n_rows), static_cast<int>(one.k),
                 static_cast<int>(one.n), one.form == MatmulForm::kTransposedWeights);
    }
  };
  std::vector<std::function<void(int set)>> launches = {
      multiply_dense,
      [&](int set) { ExpectSuccess("CUTLASS", LaunchCutlass(call(set), kTimedStream)); }};
  for (const Probed& probed : kProbed) {
    launches.push_back([&call, swap = probed.swap](int set) {
      ExpectSuccess("swapped", hopper::LaunchBFloat16(call(set), kTimedStream, swap));
    });
  }
  const std::vector<double> ms = TimeRoundRobin(launches);
  PrintCase(operands.Call(0, row_offsets, workspace, n_rows), mean, is_drawn, ms, copy_rate);
  std::printf(" | %s | differ %.4f\n", model.name, difference);
  std::fflush(stdout);
  CHECK_EQ(difference, 0.0);
}

}  // namespace

void TimeMatmuls(const std::string& cublas_dir, MatmulForm form) {
  const auto dense =
      cublas_dir.empty() ? nullptr : std::make_unique<DenseMatmul>(cublas_dir, kTimedStream);
  double copy_rate = 0;
  for (const Model& model : kModels) {
    const Operands operands(Of(model, form), form);
    if (copy_rate == 0) {
      const Buffer none(0);
      copy_rate = CopyRate(operands.Call(0, none, none, 0));
      std::printf("copy: %.2f TB/s read and written; dense: %s\n", copy_rate * 1e-9,
                  dense == nullptr ? "CUTLASS with one group" : "cuBLAS");
    }
    for (const bool is_drawn : {false, true}) {
      for (const uint32_t mean : kMeans) {
        TimeCase(operands, mean, is_drawn, dense.get(), copy_rate);
      }
    }
  }
}

}  // namespace jax_ep::matmul
