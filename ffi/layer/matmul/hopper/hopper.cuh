// Launches one of up to three CUTLASS kernels for Hopper, or the one with swapped operands. They
// are one kernel, so that those that are not chosen cost no launch. Another kernel fills the tables
// that they read, from the row offsets.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "layer/matmul/hopper/cutlass_kernels.cuh"
#include "layer/matmul/hopper/hopper_swapped.cuh"
#include "layer/matmul/hopper/kernel_choice.cuh"
#include "layer/matmul/kernels.h"
#include "layer/matmul/matmul_call.h"
#include "layer/matmul/row_range.cuh"
#include "p2p/device/ptx.cuh"
#include "p2p/launch/launch.h"

namespace jax_ep::matmul::hopper {

// An entry per group in each table.
template <class Kernel>
struct GroupTables {
  using LhsStride = typename Kernel::InternalStrideA;
  using RhsStride = typename Kernel::InternalStrideB;
  using OutStride = typename Kernel::InternalStrideD;

  typename ProblemShape::UnderlyingProblemShape* shapes;
  const typename Kernel::ElementA** lhs;
  const typename Kernel::ElementB** rhs;
  typename Kernel::ElementD** out;
  LhsStride* lhs_strides;
  RhsStride* rhs_strides;
  OutStride* out_strides;
  // Of codes.
  const float** lhs_scales;
  const float** rhs_scales;
  LhsScales* lhs_scales_layouts;
  Choice* choice;  // one
};

// The stride that is not 1: elements from one row to the next, or from one column to the next.
template <class Stride>
__device__ void SetStride(Stride& stride, int64_t elements) {
  if constexpr (cute::is_static<std::decay_t<decltype(cute::get<0>(stride))>>::value) {
    cute::get<1>(stride) = elements;
  } else {
    cute::get<0>(stride) = elements;
  }
}

template <MatmulForm kForm, class Kernel>
__device__ void FillEntry(const MatmulCall& call, const GroupTables<Kernel>& tables, int64_t group,
                          const RowRange& rows) {
  const int m = static_cast<int>(rows.size);
  const int k = static_cast<int>(call.k), n = static_cast<int>(call.n);
  const auto* const lhs = static_cast<const typename Kernel::ElementA*>(call.lhs);
  const auto* const rhs = static_cast<const typename Kernel::ElementB*>(call.rhs);
  auto* const out = static_cast<typename Kernel::ElementD*>(call.out);
  tables.lhs[group] = lhs + rows.first * call.k;
  SetStride(tables.lhs_strides[group], call.k);
  SetStride(tables.out_strides[group], call.n);
  if constexpr (kForm == MatmulForm::kRows) {
    // CUTLASS multiplies along an empty axis what it finds in its registers.
    tables.shapes[group] = cute::make_shape(m > 0 ? k : 0, n, m);
    tables.rhs[group] = rhs + rows.first * call.n;
    SetStride(tables.rhs_strides[group], call.n);
    tables.out[group] = out + group * call.k * call.n;
  } else {
    tables.shapes[group] = cute::make_shape(m, n, k);
    tables.rhs[group] = rhs + group * call.k * call.n;
    SetStride(tables.rhs_strides[group], kForm == MatmulForm::kWeights ? call.n : call.k);
    tables.out[group] = out + rows.first * call.n;
  }
  if (call.lhs_scales != nullptr) {
    const int64_t k_blocks = call.k / kMatmulScaleBlock;
    const int64_t n_blocks = (call.n + kMatmulScaleBlock - 1) / kMatmulScaleBlock;
    tables.lhs_scales[group] = call.lhs_scales + rows.first;
    tables.rhs_scales[group] = call.rhs_scales + group * n_blocks * k_blocks;
    auto& stride = cute::get<1>(cute::get<1>(tables.lhs_scales_layouts[group].stride()));
    stride = static_cast<int32_t>(call.n_rows);
  }
}

constexpr int kTableThreads = 256;

// The first block fills the tables. All of them zero what the matmul does not write.
template <MatmulForm kForm, class Kernel>
__global__ void __launch_bounds__(kTableThreads)
    FillTables(const __grid_constant__ MatmulCall call,
               const __grid_constant__ GroupTables<Kernel> tables,
               const __grid_constant__ SwappedTables swapped) {
  p2p::griddepcontrol_launch_dependents();  // the matmul may start, and waits
  p2p::griddepcontrol_wait();
  if (blockIdx.x == 0) {
    __shared__ GroupSums sums;
    if (threadIdx.x == 0) sums = {};
    __syncthreads();
    GroupSums own{};
    for (int64_t group = threadIdx.x; group < call.n_groups; group += kTableThreads) {
      const RowRange rows = RowRange::Of(call, group);
      FillEntry<kForm>(call, tables, group, rows);
      own.Add(rows.size);
    }
    if (threadIdx.x / 32 * 32 < call.n_groups) own.AddTo(sums);
    __syncthreads();
    const Choice choice = swapped.Choose(sums);
    if (threadIdx.x == 0) *tables.choice = choice;
    if (choice.kernel == KernelChoice::kSwapped) {
      FillSwappedTable(call, swapped.tiles, choice.max_tile_rows);
    }
  }
  ZeroUnwritten(call);
}

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
  tables.choice = workspace.Take<Choice>(1);
  return tables;
}

// In the place of a kernel with swapped operands.
struct NoKernel {
  struct Params {};
};

// None if the kernel with swapped operands is not to be chosen.
template <class Swapped>
SwappedTables TakeSwappedTables(const MatmulCall& call, Swap swap, bool is_memory_slow, int n_sms,
                                Workspace& workspace) {
  if (swap == Swap::kByRows && !MaySwap(call, is_memory_slow)) swap = Swap::kNever;
  if (std::is_same_v<Swapped, NoKernel> || swap == Swap::kNever) return {{}, Swap::kNever, {}, 0};
  const auto n = static_cast<size_t>(call.n_groups);
  return {{workspace.Take<uint32_t>(n), workspace.Take<MatmulSpan>(n), workspace.Take<uint32_t>(1)},
          swap,
          GridOf(call, n_sms),
          ManyRowsOf(call, is_memory_slow)};
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

// Kernels for many, some and few rows per group, of which any may be the same, and one with swapped
// operands or NoKernel. All have as many threads, and clusters of the same shape.
template <class Many, class Some, class Few, class Swapped>
struct KernelSet {
  static constexpr bool kHasSwapped = !std::is_same_v<Swapped, NoKernel>;
  using Any = std::conditional_t<kHasSwapped, Swapped, Many>;
  static constexpr int kNumThreads = Many::MaxThreadsPerBlock;
  static constexpr size_t kSmemBytes =
      std::max<size_t>({Many::SharedStorageSize, Some::SharedStorageSize, Few::SharedStorageSize,
                        Any::SharedStorageSize});
  static_assert(kNumThreads == Some::MaxThreadsPerBlock && kNumThreads == Few::MaxThreadsPerBlock &&
                kNumThreads == Any::MaxThreadsPerBlock);
  using Cluster = typename Many::ClusterShape;
  static_assert(std::is_same_v<Cluster, typename Some::ClusterShape> &&
                std::is_same_v<Cluster, typename Few::ClusterShape> &&
                std::is_same_v<Cluster, typename Any::ClusterShape>);
};

template <class Many, class Some, class Few, class Swapped>
__global__ void __launch_bounds__(KernelSet<Many, Some, Few, Swapped>::kNumThreads, 1)
    MultiplyGroups(const __grid_constant__ typename Many::Params many,
                   const __grid_constant__ typename Some::Params some,
                   const __grid_constant__ typename Few::Params few,
                   const __grid_constant__ typename Swapped::Params swapped, const Choice* choice) {
  extern __shared__ char smem[];
  p2p::griddepcontrol_wait();
  // A comparison for equality puts the code, which is long, behind that of kMany and kSome. Where
  // it came first, CUTLASS's kernels took 1 to 5 us longer: probably, the hardware loads the
  // beginning of a kernel's code ahead.
  if constexpr (KernelSet<Many, Some, Few, Swapped>::kHasSwapped) {
    if (choice->kernel == KernelChoice::kSwapped) {
      Swapped{}(swapped, &choice->max_tile_rows, smem);
      return;
    }
  }
  if constexpr (!std::is_same_v<Few, Some>) {
    if (choice->kernel == KernelChoice::kFew) {
      Few{}(few, smem);
      return;
    }
  }
  if constexpr (!std::is_same_v<Some, Many>) {
    if (choice->kernel != KernelChoice::kMany) {
      Some{}(some, smem);
      return;
    }
  }
  Many{}(many, smem);
}

template <class Kernel>
size_t TensorMapBytes(int n_sms) {
  typename Kernel::Arguments arguments{};
  arguments.hw_info.sm_count = n_sms;
  return Kernel::get_workspace_size(arguments);
}

// The parameters of a kernel that reads these tables.
template <class Kernel, class OtherTables>
typename Kernel::Params MakeParams(const MatmulCall& call, const OtherTables& tables, int n_sms,
                                   void* tensor_maps) {
  GroupTables<Kernel> own;
  static_assert(sizeof(own) == sizeof(tables));
  memcpy(&own, &tables, sizeof(own));  // the types of the elements agree
  return Kernel::to_underlying_arguments(MakeArguments<Kernel>(call, own, n_sms), tensor_maps);
}

template <MatmulForm kForm, class Many, class Some = Many, class Few = Some,
          class Swapped = NoKernel>
cudaError_t Launch(const MatmulCall& call, LaunchMode mode, Swap swap = Swap::kNever) {
  using Set = KernelSet<Many, Some, Few, Swapped>;
  const auto kernel = MultiplyGroups<Many, Some, Few, Swapped>;
  if (mode.only_loads()) return LoadAhead(FillTables<kForm, Many>, kernel);
  int n_sms = 0;
  cudaError_t error = p2p::CountSms(&n_sms);
  if (error != cudaSuccess) return error;
  bool is_memory_slow = false;
  error = swapped::IsMemorySlow(&is_memory_slow);
  if (error != cudaSuccess) return error;

  Workspace workspace(call);
  const auto tables = TakeTables<Many>(call, workspace);
  const auto swapped_tables =
      TakeSwappedTables<Swapped>(call, swap, is_memory_slow, n_sms, workspace);
  char* const maps = workspace.Take<char>(  // only one kernel of the set uses them
      std::max(
          {TensorMapBytes<Many>(n_sms), TensorMapBytes<Some>(n_sms), TensorMapBytes<Few>(n_sms)}));
  if (!workspace.fits()) return cudaErrorInvalidValue;
  if (swapped_tables.swap != Swap::kNever && call.n_groups > kMaxTiledGroups) {
    return cudaErrorInvalidValue;
  }

  p2p::LaunchShape shape{dim3(NumZeroBlocks(call, n_sms)), kTableThreads, 0, mode.stream()};
  shape.starts_early = true;
  error = p2p::LaunchKernel(FillTables<kForm, Many>, shape, call, tables, swapped_tables);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(Set::kSmemBytes));
  if (error != cudaSuccess) return error;
  typename Swapped::Params swapped_params{};
  if constexpr (Set::kHasSwapped) {
    if (swapped_tables.swap != Swap::kNever) {
      error = swapped::MakeParams(call, swapped_tables.tiles, swapped_params);
    }
    if (error != cudaSuccess) return error;
  }
  const auto many = MakeParams<Many>(call, tables, n_sms, maps);
  using Cluster = typename Set::Cluster;
  shape.grid = Many::get_grid_shape(many);
  shape.cluster = dim3(cute::size<0>(Cluster{}), cute::size<1>(Cluster{}));
  shape.n_threads = Set::kNumThreads;
  shape.smem_bytes = Set::kSmemBytes;
  return p2p::LaunchKernel(kernel, shape, many, MakeParams<Some>(call, tables, n_sms, maps),
                           MakeParams<Few>(call, tables, n_sms, maps), swapped_params,
                           tables.choice);
}

template <MatmulForm kForm, class In, class Out, class Swapped = NoKernel>
cudaError_t LaunchByRowCount(const MatmulCall& call, LaunchMode mode, Swap swap = Swap::kNever) {
  return Launch<kForm, typename PlainKernel<In, Out, kForm, ManyRows>::Type,
                typename PlainKernel<In, Out, kForm, SomeRows>::Type,
                typename PlainKernel<In, Out, kForm, FewRows>::Type, Swapped>(call, mode, swap);
}

// There are kernels of our own for bfloat16 rows and weights.
template <class In, class Out>
constexpr bool kIsBFloat16 =
    std::is_same_v<In, cutlass::bfloat16_t> && std::is_same_v<Out, cutlass::bfloat16_t>;

template <class In, class Out, class Swapped>
using IfBFloat16 = std::conditional_t<kIsBFloat16<In, Out>, Swapped, NoKernel>;

template <class In, class Out>
cudaError_t LaunchByForm(const MatmulCall& call, LaunchMode mode, Swap swap) {
  using Form = MatmulForm;
  switch (call.form) {
    case Form::kWeights:
      return LaunchByRowCount<Form::kWeights, In, Out, IfBFloat16<In, Out, swapped::Kernel>>(
          call, mode, swap);
    case Form::kTransposedWeights:
      return LaunchByRowCount<Form::kTransposedWeights, In, Out,
                              IfBFloat16<In, Out, swapped::TransposedKernel>>(call, mode, swap);
    case Form::kRows:
      if constexpr (kIsBFloat16<In, Out>) {
        return LaunchWeightGradient(call, mode);
      } else {
        return Launch<Form::kRows, typename PlainKernel<In, Out, Form::kRows, AlongRows>::Type>(
            call, mode);
      }
  }
  return cudaErrorInvalidValue;
}

// The matmuls of operands of type In, which results have, too, or float32.
template <class In, RowType kIn>
cudaError_t LaunchPlain(const MatmulCall& call, LaunchMode mode, Swap swap = Swap::kNever) {
  if (call.out_type == kIn) return LaunchByForm<In, In>(call, mode, swap);
  if (call.out_type == RowType::kFloat32) return LaunchByForm<In, float>(call, mode, swap);
  return cudaErrorInvalidValue;
}

}  // namespace jax_ep::matmul::hopper
