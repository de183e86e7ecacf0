// A test on a GPU of what loads the kernels of grouped matmuls before their first launch, so that
// this need not wait for a kernel that is running.

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <string>

#include "layer/matmul/call/load_matmuls.h"
#include "layer/matmul/kernels.h"
#include "tests/unit/held_multiprocessors.cuh"
#include "tests/unit/matmul_case.cuh"

namespace jax_ep::matmul {
namespace {

// A small product, whose operands are zeros.
class Product {
 public:
  Product(MatmulForm form, Element element, RowType out_type, int64_t n_groups = 1)
      : rhs_(n_groups * kSize * kSize * 2),
        row_offsets_((n_groups + 1) * sizeof(uint32_t)),
        rhs_scales_(n_groups * sizeof(float)),
        workspace_(MatmulWorkspaceBytes(n_groups)) {
    call_.form = form, call_.element = element, call_.out_type = out_type;
    call_.n_rows = kSize, call_.n_groups = n_groups, call_.k = kSize, call_.n = kSize;
    if (element == Element::kE4m3) {
      call_.lhs_scales = lhs_scales_.As<float>(), call_.rhs_scales = rhs_scales_.As<float>();
    }
    call_.lhs = lhs_.As<void>(), call_.rhs = rhs_.As<void>();
    call_.row_offsets = row_offsets_.As<uint32_t>();
    call_.out = out_.As<void>();
    call_.workspace = workspace_.As<void>(), call_.workspace_bytes = workspace_.size();
    for (const Buffer* const buffer : {&lhs_, &lhs_scales_, &rhs_, &rhs_scales_, &row_offsets_}) {
      ExpectSuccess("cudaMemset", cudaMemset(buffer->As<void>(), 0, buffer->size()));
    }
    ExpectSuccess("cudaDeviceSynchronize", cudaDeviceSynchronize());
  }

  // Whether it ends while a kernel of another stream runs. Prints how long its launch takes.
  bool EndsMeanwhile(const std::string& name) const {
    using Clock = std::chrono::steady_clock;
    constexpr uint64_t kNanoseconds = 500'000'000;
    cudaStream_t streams[2];
    for (cudaStream_t& stream : streams) {
      ExpectSuccess("cudaStreamCreate", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    }
    Spin<<<1, 1, 0, streams[0]>>>(kNanoseconds, nullptr, nullptr);
    ExpectSuccess("Spin", cudaGetLastError());
    const auto begin = Clock::now();
    ExpectSuccess("LaunchMatmul", LaunchMatmul(call_, streams[1]));
    const std::chrono::duration<double, std::milli> time = Clock::now() - begin;
    ExpectSuccess("the product", cudaStreamSynchronize(streams[1]));
    const bool is_spinning = cudaStreamQuery(streams[0]) == cudaErrorNotReady;
    cudaGetLastError();  // not an error
    ExpectSuccess("cudaDeviceSynchronize", cudaDeviceSynchronize());
    for (cudaStream_t stream : streams) cudaStreamDestroy(stream);
    std::cout << name << ": launched in " << time.count() << " ms, "
              << (is_spinning ? "does not wait" : "waits") << " for a running kernel" << std::endl;
    return is_spinning;
  }

 private:
  static constexpr int kSize = kMatmulScaleBlock;

  MatmulCall call_{};
  const Buffer lhs_{kSize * kSize * 2}, lhs_scales_{kSize * sizeof(float)};
  const Buffer rhs_, row_offsets_, rhs_scales_;
  const Buffer out_{kSize * kSize * 4}, workspace_;
};

size_t FreeBytes() {
  size_t n_free = 0, n_total = 0;
  ExpectSuccess("cudaMemGetInfo", cudaMemGetInfo(&n_free, &n_total));
  return n_free;
}

// Loads once a program multiplies and a group is open.
void Load() {
  MatmulLoader& loader = MatmulLoader::Instance();
  ExpectSuccess("AddDevice", loader.AddDevice());
  CHECK_EQ(loader.IsLoaded(0), false);
  const size_t n_free = FreeBytes();
  const auto begin = std::chrono::steady_clock::now();
  ExpectSuccess("Use", loader.Use());
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
  CHECK_EQ(loader.IsLoaded(0), true);
  CHECK_EQ(loader.IsLoaded(1), false);
  std::cout << "loading takes " << time.count() << " ms and " << (n_free - FreeBytes()) / 1024
            << " KiB" << std::endl;
}

void Test() {
  ExpectSuccess("LoadAhead", LoadAhead(Spin));
  const Product first(MatmulForm::kWeights, Element::kFloat16, RowType::kFloat16);
  first.EndsMeanwhile("not loaded");
  Load();
  for (const MatmulForm form : {MatmulForm::kWeights, MatmulForm::kTransposedWeights}) {
    for (const RowType type : {RowType::kBFloat16, RowType::kFloat32}) {
      CHECK_EQ(Product(form, Element::kBFloat16, type).EndsMeanwhile("loaded"), true);
    }
  }
  const Product rows(MatmulForm::kRows, Element::kBFloat16, RowType::kBFloat16);
  CHECK_EQ(rows.EndsMeanwhile("loaded"), true);
  for (const int64_t n_groups : {1, 513}) {  // by a kernel of our own, and by CUTLASS's
    const Product codes(MatmulForm::kTransposedWeights, Element::kE4m3, RowType::kBFloat16,
                        n_groups);
    CHECK_EQ(codes.EndsMeanwhile("loaded"), true);
  }
}

}  // namespace
}  // namespace jax_ep::matmul

int main() {
  setenv("CUDA_MODULE_LOADING", "LAZY", 1);
  int n_devices = 0;
  if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
    std::cout << "matmul_load_test: no GPU" << std::endl;
    return 1;
  }
  jax_ep::matmul::Test();
  std::cout << "matmul_load_test: all passed" << std::endl;
}
