// CUTLASS's grouped matmuls for Hopper, as kernel types. One kernel multiplies all groups; it reads
// their sizes, pointers and strides from tables in device memory (GroupTables).
#pragma once

#include <type_traits>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/detail/blockwise_scale_layout.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/group_array_problem_shape.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "layer/matmul/matmul_call.h"

namespace jax_ep::matmul::hopper {

using RowMajor = cutlass::layout::RowMajor;
using ColumnMajor = cutlass::layout::ColumnMajor;
using ProblemShape = cutlass::gemm::GroupProblemShape<cute::Shape<int, int, int>>;  // (m, n, k)

// Tiles, clusters and how the warps of a block share the work: the fastest ones of those that were
// tried (docs/dev/tried.md).
template <int kM, int kN, int kClusterM, int kClusterN, bool kPingPong>
struct Schedule {
  template <int kK>
  using Tile = cute::Shape<cute::Int<kM>, cute::Int<kN>, cute::Int<kK>>;
  using Cluster = cute::Shape<cute::Int<kClusterM>, cute::Int<kClusterN>, cute::_1>;
  // Two groups of warps work on a tile each ("ping-pong"), or on one tile together.
  static constexpr bool is_ping_pong = kPingPong;
};
using ManyRows = Schedule<128, 128, 1, 2, true>;
using SomeRows = Schedule<128, 256, 1, 2, false>;
using FewRows = Schedule<64, 256, 1, 2, true>;
using AlongRows = Schedule<128, 128, 2, 1, true>;
using ScaledRows = Schedule<128, 128, 1, 2, false>;

// The first type if the schedule is ping-pong.
template <class Schedule, class PingPong, class Together>
using IfPingPong = std::conditional_t<Schedule::is_ping_pong, PingPong, Together>;

// Writes the float32 sums, converted to Out. There is no third operand.
template <class Out, class Schedule, class Tile>
using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, typename Schedule::Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, RowMajor*,
    16 / sizeof(Out), Out, RowMajor*, 16 / sizeof(Out),
    IfPingPong<Schedule, cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong,
               cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative>,
    cutlass::epilogue::fusion::LinearCombination<Out, float, void, float>>::CollectiveOp;

template <class In, class LhsLayout, class RhsLayout, class Schedule, class Tile, class Epilogue,
          class KernelSchedule>
using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, In, LhsLayout, 16 / sizeof(In), In,
    RhsLayout, 16 / sizeof(In), float, Tile, typename Schedule::Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
        sizeof(typename Epilogue::SharedStorage))>,
    KernelSchedule>::CollectiveOp;

// In and Out are CUTLASS's types. CUTLASS calls a matrix [n, k] column-major if k is contiguous.
template <class In, class Out, MatmulForm kForm, class Schedule>
struct PlainKernel {
  using Tile = typename Schedule::template Tile<64>;
  using LhsLayout = std::conditional_t<kForm == MatmulForm::kRows, ColumnMajor, RowMajor>;
  using RhsLayout =
      std::conditional_t<kForm == MatmulForm::kTransposedWeights, ColumnMajor, RowMajor>;
  using KernelSchedule =
      IfPingPong<Schedule, cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong,
                 cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative>;
  using Store = Epilogue<Out, Schedule, Tile>;
  using Type = cutlass::gemm::kernel::GemmUniversal<
      ProblemShape, Mainloop<In, LhsLayout*, RhsLayout*, Schedule, Tile, Store, KernelSchedule>,
      Store>;
};

// Scales of 1 x 128 blocks of rows, [k / 128, C], and of 128 x 128 blocks of weights.
using ScaleConfig =
    cutlass::detail::Sm90BlockwiseScaleConfig<1, kMatmulScaleBlock, kMatmulScaleBlock,
                                              cute::GMMA::Major::MN, cute::GMMA::Major::K>;
using LhsScales = decltype(ScaleConfig::deduce_layoutSFA());
using RhsScales = decltype(ScaleConfig::deduce_layoutSFB());

// CUTLASS takes the scales of a group's rows for a compact array, [k / 128, rows of the group], and
// does not read their layout. Here, the layout in the table says how far apart the blocks are.
template <class Mainloop>
struct WithScaleStrides : Mainloop {
  using Params = typename Mainloop::Params;

  template <class Inputs, class Shape>
  CUTLASS_DEVICE auto tensors_perform_update(const Inputs&, const Params& params, Shape shape,
                                             int32_t group) {
    auto [lhs, rhs, lhs_scales, rhs_scales] =
        Mainloop::load_init(shape, params, params.ptr_SFA[group], params.ptr_SFB[group]);
    auto layout = lhs_scales.layout();
    static_assert(std::is_same_v<decltype(layout), LhsScales>);
    BlockStride(layout) = BlockStride(params.layout_SFA[group]);
    return cute::make_tuple(lhs, rhs, cute::make_tensor(lhs_scales.data(), layout), rhs_scales);
  }

  template <class Layout>
  CUTE_HOST_DEVICE static auto& BlockStride(Layout& layout) {
    return cute::get<1>(cute::get<1>(layout.stride()));
  }
};

// e4m3 x e4m3 with scales, in the form kTransposedWeights. Every 128 products are summed by the
// tensor cores, scaled, and added up in float32.
template <class Out, class Schedule>
struct ScaledKernel {
  using In = cutlass::float_e4m3_t;
  using Tile = typename Schedule::template Tile<kMatmulScaleBlock>;
  using KernelSchedule =
      IfPingPong<Schedule, cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpongFP8Blockwise,
                 cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperativeFP8Blockwise>;
  using Store = Epilogue<Out, Schedule, Tile>;
  using Type = cutlass::gemm::kernel::GemmUniversal<
      ProblemShape,
      WithScaleStrides<
          Mainloop<In, cute::tuple<RowMajor*, LhsScales*>, cute::tuple<ColumnMajor*, RhsScales*>,
                   Schedule, Tile, Store, KernelSchedule>>,
      Store>;
};

}  // namespace jax_ep::matmul::hopper
