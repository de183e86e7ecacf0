#include "layer/matmul/call/load_matmuls.h"

#include <cuda_runtime_api.h>

#include "layer/matmul/fp8_gradient.h"
#include "layer/matmul/gated.h"
#include "layer/matmul/kernels.h"
#include "p2p/launch/cuda_status.h"

namespace jax_ep::matmul {
namespace {

constexpr MatmulForm kForms[] = {MatmulForm::kWeights, MatmulForm::kTransposedWeights,
                                 MatmulForm::kRows};
constexpr Element kElements[] = {Element::kBFloat16, Element::kFloat16, Element::kE4m3};

// Of sizes that all kernels take.
MatmulCall MakeCall(MatmulForm form, Element element, RowType out_type) {
  MatmulCall call{};
  call.form = form, call.element = element, call.out_type = out_type;
  call.n_rows = call.n_groups = 1, call.k = call.n = kMatmulScaleBlock;
  call.workspace_bytes = MatmulWorkspaceBytes(call.n_groups);
  return call;
}

// Of loading several kernels. Whatever is not a lack of memory means that there is no such kernel.
class LoadStatus {
 public:
  void Add(cudaError_t error) {
    if (error == cudaErrorMemoryAllocation) error_ = error;
    cudaGetLastError();  // clears it: the next launch must not report it
  }
  cudaError_t error() const { return error_; }

 private:
  cudaError_t error_ = cudaSuccess;
};

void LoadPlain(LoadStatus& status) {
  for (const MatmulForm form : kForms) {
    for (const Element element : kElements) {
      for (const RowType out_type : kRowTypes) {
        MatmulCall call = MakeCall(form, element, out_type);
        for (const bool accumulates : {false, true}) {
          call.accumulates = accumulates;
          status.Add(LaunchMatmul(call, LaunchMode::OnlyLoad()));
        }
      }
    }
  }
}

void LoadGated(LoadStatus& status) {
  const LaunchMode mode = LaunchMode::OnlyLoad();
  const MatmulCall call{};
  for (const bool is_interleaved : {false, true}) {
    Gate gate{};
    gate.is_interleaved = is_interleaved;
    status.Add(hopper::LaunchGated(call, gate, mode));
    GatedGradient gradient{};
    gradient.is_interleaved = is_interleaved;
    status.Add(hopper::LaunchGatedGradient(call, gradient, mode));
  }
  status.Add(hopper::LaunchGatedScaled(call, Gate{}, mode));
}

void LoadFp8Gradients(LoadStatus& status) {
  const LaunchMode mode = LaunchMode::OnlyLoad();
  status.Add(hopper::LaunchQuantizeRows(QuantizeCall{}, mode));
  for (const bool accumulates : {false, true}) {
    for (const RowType out_type : {RowType::kBFloat16, RowType::kFloat32}) {
      MatmulCall call = MakeCall(MatmulForm::kRows, Element::kE4m3, out_type);
      call.accumulates = accumulates;
      status.Add(hopper::LaunchCodesGradient(call, mode));
    }
  }
}

}  // namespace

cudaError_t LoadMatmuls() {
  LoadStatus status;
  LoadPlain(status);
  if (IsHopper()) LoadGated(status), LoadFp8Gradients(status);
  return status.error();
}

// Never destroyed: XLA may compile until the process has ended.
MatmulLoader& MatmulLoader::Instance() {
  static MatmulLoader* const instance = new MatmulLoader;
  return *instance;
}

cudaError_t MatmulLoader::AddDevice() {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const std::lock_guard lock(mutex_);
  if (devices_.count(device) > 0) return error;
  if (are_used_) error = LoadMatmuls();
  if (error == cudaSuccess) devices_.insert(device);
  return error;
}

cudaError_t MatmulLoader::Use() {
  const std::lock_guard lock(mutex_);
  if (are_used_) return cudaSuccess;
  for (const int device : devices_) {
    const p2p::ScopedDevice scoped(device);
    const cudaError_t error = LoadMatmuls();
    if (error != cudaSuccess) return error;
  }
  are_used_ = true;
  return cudaSuccess;
}

bool MatmulLoader::IsLoaded(int device) const {
  const std::lock_guard lock(mutex_);
  return are_used_ && devices_.count(device) > 0;
}

}  // namespace jax_ep::matmul
