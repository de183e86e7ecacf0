// Launches one of two CUTLASS kernels for Hopper: the device chooses, since only it knows how many
// rows the groups have.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/matmul/cutlass_kernels.cuh"
#include "cuda/matmul/group_tables.cuh"
#include "cuda/matmul/kernels.h"

namespace jax_ep::p2p::hopper {

// Hands out parts of the workspace.
class Workspace {
 public:
  explicit Workspace(const MatmulCall& call)
      : next_(static_cast<char*>(call.workspace)), end_(next_ + call.workspace_bytes) {}

  // Null if the workspace is too small; see fits().
  template <class T>
  T* Take(size_t count) {
    constexpr size_t kAlignment = 128;
    const size_t n_bytes = (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    fits_ = fits_ && n_bytes <= static_cast<size_t>(end_ - next_);
    if (!fits_) return nullptr;
    T* const taken = reinterpret_cast<T*>(next_);
    next_ += n_bytes;
    return taken;
  }

  bool fits() const { return fits_; }

 private:
  char* next_;
  char* const end_;
  bool fits_ = true;
};

template <class Kernel>
GroupTables<Kernel> TakeTables(const MatmulCall& call, Workspace& workspace) {
  using Tables = GroupTables<Kernel>;
  const auto n = static_cast<size_t>(call.n_groups);
  const size_t n_scaled = call.lhs_scales == nullptr ? 0 : n;
  Tables tables{};
  tables.shapes = workspace.Take<std::remove_pointer_t<decltype(tables.shapes)>>(n);
  tables.lhs = workspace.Take<const typename Kernel::ElementA*>(n);
  tables.rhs = workspace.Take<const typename Kernel::ElementB*>(n);
  tables.out = workspace.Take<typename Kernel::ElementD*>(n);
  tables.lhs_strides = workspace.Take<typename Tables::LhsStride>(n);
  tables.rhs_strides = workspace.Take<typename Tables::RhsStride>(n);
  tables.out_strides = workspace.Take<typename Tables::OutStride>(n);
  tables.lhs_scales = workspace.Take<const float*>(n_scaled);
  tables.rhs_scales = workspace.Take<const float*>(n_scaled);
  tables.lhs_scales_layouts = workspace.Take<LhsScales>(n_scaled);
  tables.is_few_rows = workspace.Take<uint32_t>(1);
  return tables;
}

template <class Kernel>
typename Kernel::Arguments MakeArguments(const MatmulCall& call, const GroupTables<Kernel>& tables,
                                         int n_sms) {
  typename Kernel::Arguments arguments{};
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
  arguments.problem_shape = {static_cast<int>(call.n_groups), tables.shapes, nullptr};
  arguments.mainloop.ptr_A = tables.lhs;
  arguments.mainloop.dA = tables.lhs_strides;
  arguments.mainloop.ptr_B = tables.rhs;
  arguments.mainloop.dB = tables.rhs_strides;
  if constexpr (std::is_same_v<typename Kernel::ElementA, cutlass::float_e4m3_t>) {
    arguments.mainloop.ptr_SFA = tables.lhs_scales;
    arguments.mainloop.layout_SFA = tables.lhs_scales_layouts;
    arguments.mainloop.ptr_SFB = tables.rhs_scales;
    arguments.mainloop.layout_SFB = nullptr;  // compact
  }
  arguments.epilogue.ptr_D = tables.out;
  arguments.epilogue.dD = tables.out_strides;
  arguments.epilogue.thread.alpha = 1.0f;
  arguments.epilogue.thread.beta = 0.0f;
  arguments.hw_info.sm_count = n_sms;
  return arguments;
}

// Both kernels have as many threads and clusters of the same shape. If they are the same, there is
// no choice.
template <class Many, class Few>
struct KernelPair {
  static constexpr bool kHasChoice = !std::is_same_v<Many, Few>;
  static constexpr int kNumThreads = Many::MaxThreadsPerBlock;
  static constexpr size_t kSmemBytes =
      std::max<size_t>(Many::SharedStorageSize, Few::SharedStorageSize);
  static_assert(kNumThreads == Few::MaxThreadsPerBlock);
  static_assert(std::is_same_v<typename Many::ClusterShape, typename Few::ClusterShape>);
};

template <class Many, class Few>
__global__ void __launch_bounds__(KernelPair<Many, Few>::kNumThreads, 1)
    MultiplyGroups(const __grid_constant__ typename Many::Params many,
                   const __grid_constant__ typename Few::Params few, const uint32_t* is_few_rows) {
  extern __shared__ char smem[];
  griddepcontrol_wait();
  if constexpr (KernelPair<Many, Few>::kHasChoice) {
    if (*is_few_rows) {
      Few{}(few, smem);
      return;
    }
  }
  Many{}(many, smem);
}

// Like any launch, but the kernel may start before the one before it in the stream has ended.
template <class... Params, class... Args>
cudaError_t LaunchEarly(void (*kernel)(Params...), dim3 grid, dim3 cluster, int n_threads,
                        size_t smem_bytes, cudaStream_t stream, const Args&... args) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {cluster.x, cluster.y, cluster.z};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(n_threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

template <MatmulForm kForm, class Many, class Few>
cudaError_t Launch(const MatmulCall& call, cudaStream_t stream) {
  int device = 0, n_sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;

  Workspace workspace(call);
  const auto tables = TakeTables<Many>(call, workspace);
  GroupTables<Few> few_tables;
  static_assert(sizeof(few_tables) == sizeof(tables));
  memcpy(&few_tables, &tables, sizeof(tables));  // the types of the elements agree
  const auto many_arguments = MakeArguments<Many>(call, tables, n_sms);
  const auto few_arguments = MakeArguments<Few>(call, few_tables, n_sms);
  char* const tensor_maps = workspace.Take<char>(
      std::max(Many::get_workspace_size(many_arguments), Few::get_workspace_size(few_arguments)));
  if (!workspace.fits()) return cudaErrorInvalidValue;

  error = LaunchEarly(FillTables<kForm, Many>, NumZeroBlocks(call, n_sms), 1, kTableThreads, 0,
                      stream, call, tables);
  if (error != cudaSuccess) return error;
  using Pair = KernelPair<Many, Few>;
  const auto kernel = MultiplyGroups<Many, Few>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(Pair::kSmemBytes));
  if (error != cudaSuccess) return error;
  const auto many = Many::to_underlying_arguments(many_arguments, tensor_maps);
  const auto few = Few::to_underlying_arguments(few_arguments, tensor_maps);
  using Cluster = typename Many::ClusterShape;
  const dim3 cluster(cute::size<0>(Cluster{}), cute::size<1>(Cluster{}));
  return LaunchEarly(kernel, Many::get_grid_shape(many), cluster, Pair::kNumThreads,
                     Pair::kSmemBytes, stream, many, few, tables.is_few_rows);
}

// The matmuls of operands of type In with results of type Out.
template <class In, class Out>
cudaError_t LaunchPlain(const MatmulCall& call, cudaStream_t stream) {
  using Form = MatmulForm;
  switch (call.form) {
    case Form::kWeights:
      return Launch<Form::kWeights, typename PlainKernel<In, Out, Form::kWeights, ManyRows>::Type,
                    typename PlainKernel<In, Out, Form::kWeights, FewRows>::Type>(call, stream);
    case Form::kTransposedWeights:
      return Launch<Form::kTransposedWeights,
                    typename PlainKernel<In, Out, Form::kTransposedWeights, ManyRows>::Type,
                    typename PlainKernel<In, Out, Form::kTransposedWeights, FewRows>::Type>(call,
                                                                                            stream);
    case Form::kRows:
      using Kernel = typename PlainKernel<In, Out, Form::kRows, AlongRows>::Type;
      return Launch<Form::kRows, Kernel, Kernel>(call, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_ep::p2p::hopper
