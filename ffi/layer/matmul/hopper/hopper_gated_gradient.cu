// The gradient of rows of bfloat16 with that of the activation before them, for Hopper.
//
// The sums of hopper_swapped.cuh are gradients of the activation's values: a warp group's 64
// columns give those of 64 gates and of their ups. Three warps beside the one that loads compute
// and store them, while the warp groups multiply for the next tile.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "core/float_types.h"
#include "layer/activation/gate_gradients.cuh"
#include "layer/matmul/hopper/hopper_swapped.cuh"
#include "layer/matmul/hopper/tile_launch.cuh"

namespace jax_ep::matmul::swapped {

// Tiles are small, but stages have the size of those of large tiles, so that shared memory has room
// for all sums of a tile, rounded to bfloat16: in the four stages for the first warp group, and in
// the place of other kernels' results for the second one. A line has a group's columns of a row.
constexpr uint32_t kGradientRows = kSmallTileRows, kStageRows = kLargeTileRows;
constexpr uint32_t kLinesBytes = kStoreRows * kLineBytes;
static_assert(kGradientRows % kStoreRows == 0);
static_assert(NumStages(kStageRows) * kStoreRows >= kGradientRows);
static_assert((kStageRows - kGradientRows) * kLineBytes >= kLinesBytes);
static_assert(sizeof(Smem::results) >= kGradientRows * kLineBytes);

// Of kStoreRows rows of the tile, from `first` on.
__device__ __forceinline__ uint32_t Lines(uint32_t smem, uint32_t group, uint32_t first) {
  const uint32_t number = first / kStoreRows;
  if (group == 1) return smem + offsetof(Smem, results) + number * kLinesBytes;
  return smem + number * StageBytes(kStageRows) + kGradientRows * kLineBytes;
}

constexpr uint32_t kGradientThreads = kGroupThreads - 32;
// Of a warp group and the three warps, one for each warp group.
constexpr int kLinesFree = kLeadBarrier + 1, kLinesFull = kLinesFree + kWarpGroups;
constexpr uint32_t kLinesThreads = kGroupThreads + kGradientThreads;

// The tiles of the warp groups that multiply.
struct GradientSums {
  using Weights = TransposedLines;

  __device__ __forceinline__ static void Compute(Consumer& self, const MatmulTile&,
                                                 uint32_t units) {
    VisitUnits<1, kGradientRows / kRowUnit>(units, [&](auto n) {
      constexpr int kN = decltype(n)::value * kRowUnit;
      float sums[kN / 2] = {};
      Multiply<Weights, kN>(self, sums);
      barrier_sync(kLinesFree + static_cast<int>(self.index), kLinesThreads);
      const uint32_t results = offsetof(Smem, results) + self.index * sizeof(Smem::results[0]);
      WriteAllLines<0, kN>(self, self.results - results, sums);
      barrier_arrive(kLinesFull + static_cast<int>(self.index), kLinesThreads);
    });
  }

 private:
  template <int kFirst, int kN>
  __device__ __forceinline__ static void WriteAllLines(const Consumer& self, uint32_t smem,
                                                       const float* sums) {
    if constexpr (kFirst < kN) {
      WriteLines<kFirst, kN>(self.thread, Lines(smem, self.index, kFirst), sums);
      WriteAllLines<kFirst + static_cast<int>(kStoreRows), kN>(self, smem, sums);
    }
  }
};

// The hidden rows of a tile in a warp group's columns. A thread has eight columns of some rows.
template <bool kIsInterleaved>
class HiddenRows {
 public:
  static constexpr uint32_t kVectors = kLineBytes / 16;  // of a line of sums
  static constexpr uint32_t kStep = kGradientThreads / kVectors;
  static constexpr uint32_t kCount = kStoreRows / kStep;  // rows of a thread at a time

  __device__ __forceinline__ HiddenRows(const MatmulTile& tile, uint32_t column, uint32_t n_columns,
                                        uint32_t thread)
      : n_columns_(n_columns), line_(thread / kVectors) {
    column += thread % kVectors * 8;
    n_rows_ = column < n_columns_ ? tile.n_rows : 0;
    const int64_t first = int64_t{tile.row + line_} * 2 * n_columns_;
    offset_ = 2 * (first + (kIsInterleaved ? 2 : 1) * column);
  }

  // Whether the thread has gates in line first + i * kStep of its lines.
  __device__ __forceinline__ bool Has(uint32_t first, uint32_t i) const {
    return first + line_ + i * kStep < n_rows_;
  }
  __device__ __forceinline__ int64_t Offset(uint32_t first, uint32_t i) const {
    return offset_ + int64_t{first + i * kStep} * 4 * n_columns_;
  }
  __device__ __forceinline__ uint32_t up_bytes() const { return 2 * n_columns_; }

 private:
  const uint32_t n_columns_, line_;
  uint32_t n_rows_;  // of the tile; none if the thread's columns do not exist
  int64_t offset_;   // in bytes, of the thread's first gates
};

// A thread of the three warps.
template <bool kIsInterleaved>
class GradientStorer {
 public:
  __device__ GradientStorer(const GatedGradientParams& params, uint32_t smem, uint32_t thread)
      : params_(params), smem_(smem), thread_(thread) {}

  __device__ __forceinline__ void Run(const silu::Activation& activation) const {
    SentTiles tiles(smem_ + offsetof(Smem, tiles));
    const uint32_t rank = cluster_ctarank();
    MatmulTile tile;
    while (tiles.Next(tile)) {
      const uint32_t column = tile.column + rank * kBlockColumns;
      for (uint32_t i = 0; i < kWarpGroups; ++i) {
        barrier_arrive(kLinesFree + static_cast<int>(i), kLinesThreads);
        Prefetch(tile, column + i * kGroupColumns);
      }
#pragma unroll 1
      for (uint32_t i = 0; i < kWarpGroups; ++i) {
        const Rows rows(tile, column + i * kGroupColumns, params_.n_columns, thread_);
        Store(activation, rows, tile.n_rows, i);
      }
    }
  }

 private:
  using Rows = HiddenRows<kIsInterleaved>;

  // Starts to load gates and ups into the L2 cache.
  __device__ __forceinline__ void Prefetch(const MatmulTile& tile, uint32_t column) const {
    const uint32_t n_columns = params_.n_columns, half = thread_ % 2;
    const uint32_t in_row =
        kIsInterleaved ? 2 * column + half * kGroupColumns : column + half * n_columns;
    if (column >= n_columns || in_row >= 2 * n_columns) return;
    const auto* const hidden = static_cast<const uint8_t*>(params_.hidden);
    for (uint32_t row = thread_ / 2; row < tile.n_rows; row += kGradientThreads / 2) {
      prefetch_l2(hidden + 2 * (int64_t{tile.row + row} * 2 * n_columns + in_row));
    }
  }

  // Stores the gradients of a warp group's columns.
  __device__ __forceinline__ void Store(const silu::Activation& activation, const Rows& rows,
                                        uint32_t n_rows, uint32_t group) const {
    const auto* const hidden = static_cast<const uint8_t*>(params_.hidden);
    auto* const out = static_cast<uint8_t*>(params_.out);
    silu::SiluInput<BFloat16, kIsInterleaved> inputs[Rows::kCount];
    const auto load = [&](uint32_t first, uint32_t i) {
      if (rows.Has(first, i)) inputs[i].Load(hidden + rows.Offset(first, i), rows.up_bytes());
    };
#pragma unroll
    for (uint32_t i = 0; i < Rows::kCount; ++i) load(0, i);
    barrier_sync(kLinesFull + static_cast<int>(group), kLinesThreads);
#pragma unroll 1
    for (uint32_t first = 0; first < n_rows; first += kStoreRows) {
      const uint32_t lines = Lines(smem_, group, first);
#pragma unroll
      for (uint32_t i = 0; i < Rows::kCount; ++i) {
        if (rows.Has(first, i)) {
          const uint32_t line = thread_ / Rows::kVectors + i * Rows::kStep;
          const uint32_t vector = thread_ % Rows::kVectors ^ line % 8;
          const int4 of_values = ld_shared_v4(lines + line * kLineBytes + vector * 16);
          silu::StoreGateGradients<kIsInterleaved>(activation, inputs[i], of_values,
                                                   out + rows.Offset(first, i), rows.up_bytes());
        }
        load(first + kStoreRows, i);
      }
    }
  }

  const GatedGradientParams& params_;
  const uint32_t smem_, thread_;
};

template <bool kIsInterleaved>
struct GatedGradientKernel {
  __device__ __forceinline__ void operator()(const GatedGradientParams& params,
                                             char* unaligned) const {
    constexpr uint32_t kFirstLoader = kWarpGroups * kGroupThreads;
    uint32_t address = cvta_shared(unaligned);
    address += (-address) % kSmemAlignment;
    opaque(address);
    if (threadIdx.x == 0) InitBarriers(address);
    if (threadIdx.x == kFirstLoader) prefetch_tensormap(&params.weights);
    cluster_sync();
    p2p::griddepcontrol_wait();
    const Ring ring(address, kStageRows);
    if (threadIdx.x < kFirstLoader) {
      setmaxnreg_inc<kComputeRegisters>();
      Compute<GradientSums>(params, address, ring);
    } else {
      setmaxnreg_dec<kOtherRegisters>();
      if (threadIdx.x == kFirstLoader) {
        Load<TransposedLines>(params, address + offsetof(Smem, tiles), ring);
      } else if (threadIdx.x >= kFirstLoader + 32) {
        const GradientStorer<kIsInterleaved> storer(params, address,
                                                    threadIdx.x - kFirstLoader - 32);
        silu::VisitKnown(params.activation,
                         [&](const silu::Activation& activation) { storer.Run(activation); });
      }
    }
    __syncwarp();
    cluster_sync();  // the other block may still release stages here
  }

 private:
  // Of a thread; together as many as all threads have at the start, 168 each.
  static constexpr int kComputeRegisters = 200, kOtherRegisters = 104;
};

}  // namespace jax_ep::matmul::swapped

namespace jax_ep::matmul::hopper {
namespace {

template <bool kIsInterleaved>
__global__ void __launch_bounds__(swapped::Kernel::MaxThreadsPerBlock, 1)
    MultiplyAndDifferentiate(const __grid_constant__ swapped::GatedGradientParams params,
                             const uint32_t*) {
  extern __shared__ char smem[];
  swapped::GatedGradientKernel<kIsInterleaved>{}(params, smem);
}

}  // namespace

cudaError_t LaunchGatedGradient(const MatmulCall& call, const GatedGradient& gradient,
                                LaunchMode mode) {
  const auto kernel =
      gradient.is_interleaved ? MultiplyAndDifferentiate<true> : MultiplyAndDifferentiate<false>;
  const int n_threads = swapped::Kernel::MaxThreadsPerBlock;
  return LaunchTiles(
      TileKernel<swapped::GatedGradientParams>{kernel, n_threads, swapped::kSmemBytes}, call, mode,
      Swap::kSmallTiles, gradient);
}

}  // namespace jax_ep::matmul::hopper
