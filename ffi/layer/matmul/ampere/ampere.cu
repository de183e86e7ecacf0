// Grouped matmuls of bfloat16 and float16 for GPUs from Ampere on: one grouped GEMM of CUTLASS 2,
// after a kernel that fills its tables from the row offsets.

#include <cuda_runtime.h>
#include <cutlass/bfloat16.h>
#include <cutlass/epilogue/thread/linear_combination.h>
#include <cutlass/gemm/kernel/default_gemm_grouped.h>
#include <cutlass/half.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "layer/matmul/kernels.h"
#include "layer/matmul/row_range.cuh"
#include "p2p/launch/launch.h"

namespace jax_ep::matmul {
namespace {

using cutlass::gemm::GemmCoord;

constexpr int kTableThreads = 256;
constexpr int64_t kAlignment = 8;  // elements: 16 bytes of operands

// An entry per group in each table. CUTLASS takes no pointers to const, and the leading dimensions,
// which are the same for all groups, only as tables.
struct GroupTables {
  void** lhs;
  void** rhs;
  void** out;
  int64_t* k_strides;
  int64_t* n_strides;
  GemmCoord* sizes;

  static size_t Bytes(int64_t n_groups) {
    return static_cast<size_t>(n_groups) *
           (3 * sizeof(void*) + 2 * sizeof(int64_t) + sizeof(GemmCoord));
  }

  static GroupTables In(void* workspace, int64_t n_groups) {
    auto* const pointers = static_cast<void**>(workspace);
    auto* const strides = reinterpret_cast<int64_t*>(pointers + 3 * n_groups);
    auto* const sizes = reinterpret_cast<GemmCoord*>(strides + 2 * n_groups);
    return {pointers, pointers + n_groups, pointers + 2 * n_groups,
            strides,  strides + n_groups,  sizes};
  }
};

__device__ void FillEntry(const MatmulCall& call, const GroupTables& tables, int64_t group) {
  constexpr int64_t kInputBytes = 2;
  const RowRange rows = RowRange::Of(call, group);
  const int64_t of_weights = group * call.k * call.n, of_rows = rows.first * call.n;
  const bool is_rows = call.form == MatmulForm::kRows;
  char* const lhs = static_cast<char*>(const_cast<void*>(call.lhs));
  char* const rhs = static_cast<char*>(const_cast<void*>(call.rhs));
  tables.lhs[group] = lhs + rows.first * call.k * kInputBytes;
  tables.rhs[group] = rhs + (is_rows ? of_rows : of_weights) * kInputBytes;
  tables.out[group] =
      static_cast<char*>(call.out) + (is_rows ? of_weights : of_rows) * ElementBytes(call.out_type);
  tables.k_strides[group] = call.k;
  tables.n_strides[group] = call.n;
  const int k = static_cast<int>(call.k), n = static_cast<int>(call.n);
  const int m = static_cast<int>(rows.size);
  GemmCoord size = is_rows ? GemmCoord(k, n, m) : GemmCoord(m, n, k);
  // Without rows there is nothing to visit: ZeroUnwritten does what is left to do.
  if (m == 0) size = GemmCoord(0, 0, 0);
  tables.sizes[group] = size;
}

__global__ void __launch_bounds__(kTableThreads)
    FillTables(const __grid_constant__ MatmulCall call,
               const __grid_constant__ GroupTables tables) {
  const int64_t n_threads = int64_t{gridDim.x} * kTableThreads;
  for (int64_t group = int64_t{blockIdx.x} * kTableThreads + threadIdx.x; group < call.n_groups;
       group += n_threads) {
    FillEntry(call, tables, group);
  }
  ZeroUnwritten(call);
}

template <MatmulForm form, class Input, class Output, bool accumulates>
using Gemm = typename cutlass::gemm::kernel::DefaultGemmGrouped<
    Input,
    std::conditional_t<form == MatmulForm::kRows, cutlass::layout::ColumnMajor,
                       cutlass::layout::RowMajor>,
    cutlass::ComplexTransform::kNone, kAlignment, Input,
    std::conditional_t<form == MatmulForm::kTransposedWeights, cutlass::layout::ColumnMajor,
                       cutlass::layout::RowMajor>,
    cutlass::ComplexTransform::kNone, kAlignment, Output, cutlass::layout::RowMajor, float,
    cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, cutlass::gemm::GemmShape<128, 128, 32>,
    cutlass::gemm::GemmShape<64, 64, 32>, cutlass::gemm::GemmShape<16, 8, 16>,
    cutlass::epilogue::thread::LinearCombination<
        Output, 16 / sizeof(Output), float, float,
        accumulates ? cutlass::epilogue::thread::ScaleType::NoBetaScaling
                    : cutlass::epilogue::thread::ScaleType::Nothing>,
    cutlass::gemm::threadblock::GemmBatchedIdentityThreadblockSwizzle, /*Stages=*/4,
    cutlass::gemm::kernel::GroupScheduleMode::kDeviceOnly>::GemmKernel;

template <class Gemm>
__global__ void __launch_bounds__(Gemm::kThreadCount)
    GemmKernel(const __grid_constant__ typename Gemm::Params params) {
  extern __shared__ uint4 smem[];
  Gemm()(params, *reinterpret_cast<typename Gemm::SharedStorage*>(smem));
}

// With `accumulates`, CUTLASS's third operand is what `out` holds.
template <MatmulForm form, class Input, class Output, bool accumulates = false>
cudaError_t LaunchGemm(const MatmulCall& call, const GroupTables& tables, int n_sms,
                       LaunchMode mode) {
  using Gemm = matmul::Gemm<form, Input, Output, accumulates>;
  constexpr int kSmemBytes = sizeof(typename Gemm::SharedStorage);
  auto* const kernel = GemmKernel<Gemm>;
  if (mode.only_loads()) return LoadAhead(FillTables, kernel);
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (error != cudaSuccess) return error;
  int n_blocks = 0;
  error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n_blocks, kernel, Gemm::kThreadCount,
                                                        kSmemBytes);
  if (error != cudaSuccess) return error;
  if (n_blocks == 0) return cudaErrorInvalidConfiguration;
  n_blocks *= n_sms;

  auto* const inputs = reinterpret_cast<Input**>(tables.lhs);
  auto* const weights = reinterpret_cast<Input**>(tables.rhs);
  auto* const out = reinterpret_cast<Output**>(tables.out);
  int64_t* const rhs_strides =
      form == MatmulForm::kTransposedWeights ? tables.k_strides : tables.n_strides;
  const typename Gemm::Arguments arguments(tables.sizes, static_cast<int>(call.n_groups), n_blocks,
                                           {}, inputs, weights, out, out, tables.k_strides,
                                           rhs_strides, tables.n_strides, tables.n_strides);
  GemmKernel<Gemm><<<n_blocks, Gemm::kThreadCount, kSmemBytes, mode.stream()>>>(
      typename Gemm::Params(arguments));
  return cudaGetLastError();
}

using Launcher = cudaError_t (*)(const MatmulCall&, const GroupTables&, int, LaunchMode);

template <class Input, class Output>
Launcher FindLauncher(MatmulForm form) {
  switch (form) {
    case MatmulForm::kWeights:
      return LaunchGemm<MatmulForm::kWeights, Input, Output>;
    case MatmulForm::kTransposedWeights:
      return LaunchGemm<MatmulForm::kTransposedWeights, Input, Output>;
    case MatmulForm::kRows:
      return LaunchGemm<MatmulForm::kRows, Input, Output>;
  }
  return nullptr;
}

// Null if there is no such kernel.
Launcher FindLauncher(const MatmulCall& call) {
  using BFloat16 = cutlass::bfloat16_t;
  using Float16 = cutlass::half_t;
  const bool is_float32 = call.out_type == RowType::kFloat32;
  if (call.accumulates) {
    constexpr auto kForm = MatmulForm::kRows;
    if (call.form != kForm || !is_float32) return nullptr;
    if (call.element == Element::kBFloat16) return LaunchGemm<kForm, BFloat16, float, true>;
    return call.element == Element::kFloat16 ? LaunchGemm<kForm, Float16, float, true> : nullptr;
  }
  if (call.element == Element::kBFloat16) {
    if (is_float32) return FindLauncher<BFloat16, float>(call.form);
    if (call.out_type == RowType::kBFloat16) return FindLauncher<BFloat16, BFloat16>(call.form);
  }
  if (call.element == Element::kFloat16) {
    if (is_float32) return FindLauncher<Float16, float>(call.form);
    if (call.out_type == RowType::kFloat16) return FindLauncher<Float16, Float16>(call.form);
  }
  return nullptr;
}

bool IsSupported(const MatmulCall& call) {
  return call.k % kAlignment == 0 && call.n % kAlignment == 0 &&
         std::max({call.n_rows, call.n_groups, call.k, call.n}) <= INT32_MAX &&
         GroupTables::Bytes(call.n_groups) <= call.workspace_bytes;
}

}  // namespace

cudaError_t LaunchAmpereMatmul(const MatmulCall& call, LaunchMode mode) {
  const Launcher launch = FindLauncher(call);
  if (launch == nullptr || !IsSupported(call)) return cudaErrorInvalidValue;
  if (call.n_groups == 0 || call.out_elements() == 0) return cudaSuccess;
  if (call.k == 0 || call.n_rows == 0) return ZeroResult(call, mode);
  int n_sms = 0;
  cudaError_t error = p2p::CountSms(&n_sms);
  if (error != cudaSuccess) return error;
  const GroupTables tables = GroupTables::In(call.workspace, call.n_groups);
  if (!mode.only_loads()) {
    FillTables<<<NumZeroBlocks(call, n_sms), kTableThreads, 0, mode.stream()>>>(call, tables);
    error = cudaGetLastError();
  }
  if (error != cudaSuccess) return error;
  return launch(call, tables, n_sms, mode);
}

}  // namespace jax_ep::matmul
