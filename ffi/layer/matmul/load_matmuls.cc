#include "layer/matmul/load_matmuls.h"

#include <cuda_runtime_api.h>

#include "cuda/call/scoped_device.h"
#include "layer/matmul/gated.h"
#include "layer/matmul/gated_gradient.h"
#include "layer/matmul/kernels.h"

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

void LoadPlain() {
  for (const MatmulForm form : kForms) {
    for (const Element element : kElements) {
      for (const RowType out_type : kRowTypes) {
        MatmulCall call = MakeCall(form, element, out_type);
        for (const bool accumulates : {false, true}) {
          call.accumulates = accumulates;
          LaunchMatmul(call, LaunchMode::OnlyLoad());  // an error: there is no such kernel
        }
      }
    }
  }
}

void LoadGated() {
  constexpr auto kAlways = hopper::Swap::kSmallTiles;
  const auto make_call = [](MatmulForm form) {
    return MakeCall(form, Element::kBFloat16, RowType::kBFloat16);
  };
  for (const bool is_interleaved : {false, true}) {
    Gate gate{};
    gate.is_interleaved = is_interleaved;
    LaunchGated(make_call(MatmulForm::kWeights), gate, LaunchMode::OnlyLoad(), kAlways);
    GatedGradient gradient{};
    gradient.is_interleaved = is_interleaved;
    LaunchGatedGradient(make_call(MatmulForm::kTransposedWeights), gradient, LaunchMode::OnlyLoad(),
                        kAlways);
  }
}

}  // namespace

void LoadMatmuls() {
  LoadPlain();
  LoadGated();
}

// Never destroyed: XLA may compile until the process has ended.
MatmulLoader& MatmulLoader::Instance() {
  static MatmulLoader* const instance = new MatmulLoader;
  return *instance;
}

void MatmulLoader::AddDevice() {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return;
  const std::lock_guard lock(mutex_);
  if (devices_.insert(device).second && are_used_) LoadMatmuls();
}

void MatmulLoader::Use() {
  const std::lock_guard lock(mutex_);
  if (are_used_) return;
  are_used_ = true;
  for (const int device : devices_) {
    const p2p::ScopedDevice scoped(device);
    LoadMatmuls();
  }
}

bool MatmulLoader::IsLoaded(int device) const {
  const std::lock_guard lock(mutex_);
  return are_used_ && devices_.count(device) > 0;
}

}  // namespace jax_ep::matmul
