// The grouped matmul with scales for Hopper: the tiles of hopper_scaled.cuh whose results are the
// sums, rounded to bfloat16, or are activated and quantized to e4m3.
//
// Of the latter, half of a tile's columns are gates, the other half their ups, so that a thread has
// both. They give the 128 values of each row that share a scale, all in the same four lanes.

#include <cuda_runtime.h>

#include <cstdint>

#include "core/quantize.h"
#include "layer/activation/silu_input.cuh"
#include "layer/matmul/gated.h"
#include "layer/matmul/hopper/block_encoder.cuh"
#include "layer/matmul/hopper/hopper_scaled.cuh"
#include "layer/matmul/hopper/tile_launch.cuh"
#include "layer/matmul/kernels.h"
#include "p2p/device/reduce.cuh"

namespace jax_ep::matmul::scaled {

struct PlainTiles {
  using Params = scaled::Params;
  using Self = Consumer<PlainTiles>;

  __device__ __forceinline__ static LoadedColumns Columns(const MatmulTile& tile, uint32_t rank) {
    return {static_cast<int>(tile.column + rank * kBlockColumns), 0};
  }
  __device__ __forceinline__ static ColumnBlocks BlocksOf(const Params&, const MatmulTile& tile) {
    const uint32_t first = tile.column / kScaleBlock;
    return {first, first + 1};
  }
  __device__ __forceinline__ static RowScales ScalesOf(const Self&,
                                                       const RowScales (&scales)[kHalves],
                                                       uint32_t half, uint32_t) {
    return half == 0 ? scales[0] : scales[1];
  }

  __device__ __forceinline__ static void Store(const Self& self, const BlockTile& tile,
                                               const float (&sums)[kHalves][kSums]) {
#pragma unroll
    for (uint32_t half = 0; half < kHalves; ++half) {
      StoreColumns(self, tile, self.index * kGroupRows, half, sums[half]);
    }
  }
  __device__ __forceinline__ static void StoreHalf(const Self& self, const BlockTile& tile,
                                                   const float (&sums)[kHalves][kSums]) {
    StoreColumns(self, tile, 0, self.index, sums[0]);
  }

 private:
  static constexpr uint32_t kWarpRows = 16;
  static constexpr uint32_t kLineColumns = kLineBytes / 2;  // of bfloat16
  static constexpr uint32_t kLinesBytes = kWarpRows * kLineBytes;
  static_assert(kWarpGroups * 4 * kLinesBytes <= sizeof(Smem::results));

  // Stores 128 columns of 64 rows, from `first_row` of the block's on. A warp rearranges 64 columns
  // of its 16 rows at a time, so that a row has them in a line.
  __device__ __forceinline__ static void StoreColumns(const Self& self, const BlockTile& tile,
                                                      uint32_t first_row, uint32_t half,
                                                      const float* sums) {
    const uint32_t warp = self.index * 4 + self.warp(), lane = self.lane();
    const uint32_t lines = self.smem + offsetof(Smem, results) + warp * kLinesBytes;
#pragma unroll
    for (uint32_t first = 0; first < kScaleBlock; first += kLineColumns) {
      __syncwarp();  // what the lines held has been read
      WriteLines(lines, lane, sums + first / 2);
      __syncwarp();
      StoreLines(self, tile, first_row + self.warp() * kWarpRows,
                 tile.column + half * kScaleBlock + first, lines);
    }
  }

  __device__ __forceinline__ static void WriteLines(uint32_t lines, uint32_t lane,
                                                    const float* sums) {
    const auto pack = [&](uint32_t i) { return p2p::cvt_rn_bf16x2_f32(sums[i + 1], sums[i]); };
    const uint32_t line = lane % 16, to = lines + line * kLineBytes;
#pragma unroll
    for (uint32_t vector = 0; vector < kLineBytes / 16; vector += 2) {
      const uint32_t swizzled = (vector + lane / 16) ^ line % 8, i = vector * 4;
      stmatrix_x4(to + swizzled * 16, pack(i), pack(i + 2), pack(i + 4), pack(i + 6));
    }
  }

  __device__ __forceinline__ static void StoreLines(const Self& self, const BlockTile& tile,
                                                    uint32_t first_row, uint32_t first_column,
                                                    uint32_t lines) {
    constexpr uint32_t kVectors = kLineBytes / 16, kStep = 32 / kVectors;
    const uint32_t n_columns = self.params.n_columns;
    const uint32_t vector = self.lane() % kVectors, column = first_column + vector * 8;
    if (column >= n_columns) return;
#pragma unroll
    for (uint32_t i = 0; i < kWarpRows; i += kStep) {
      const uint32_t line = i + self.lane() / kVectors, row = first_row + line;
      const int4 values = ld_shared_v4(lines + line * kLineBytes + (vector ^ line % 8) * 16);
      if (row >= tile.n_rows) return;
      const int64_t element = int64_t{tile.row + row} * n_columns + column;
      p2p::st_global(static_cast<char*>(self.params.out) + element * 2, values);
    }
  }
};

static_assert(BlockwiseFp8::kBlockSize == kScaleBlock);

// For __byte_perm: the lower or the upper halves of two words.
constexpr uint32_t kLowerHalves = 0x5410, kUpperHalves = 0x7632;

// Two neighboring columns of a row, rounded to bfloat16.
__device__ __forceinline__ uint32_t Rounded(const float* sums, uint32_t i) {
  return p2p::PackPair(sums[i], sums[i + 1], BFloat16{});
}

// The biases of a thread's columns, as pairs of neighbors. Without one, it is -0, to which any
// number can be added without a change of its bits.
struct Biases {
  static constexpr uint32_t kUnits = kSums / 4;  // of eight columns
  uint32_t gates[kUnits], ups[kUnits];

  __device__ __forceinline__ Biases(const GatedParams& params, const BlockTile& tile) {
    const uint32_t row_size = params.n_columns / 2;
    const uint32_t first = tile.column / 2 + threadIdx.x % 4 * 2;  // a gate
    const uint16_t* const of_group = params.bias + size_t{tile.group} * params.n_columns;
    const auto load = [&](uint32_t column) {
      return __ldg(reinterpret_cast<const uint32_t*>(of_group + column));
    };
#pragma unroll
    for (uint32_t i = 0; i < kUnits; ++i) gates[i] = ups[i] = 0x80008000;
    if (params.bias == nullptr) return;
    if (!params.is_interleaved) {
#pragma unroll
      for (uint32_t i = 0; i < kUnits; ++i) {
        gates[i] = load(first + i * 8), ups[i] = load(row_size + first + i * 8);
      }
    } else {
#pragma unroll
      for (uint32_t i = 0; i < kUnits; ++i) {
        const uint32_t pair = load(2 * (first + i * 8)), next = load(2 * (first + i * 8) + 2);
        gates[i] = __byte_perm(pair, next, kLowerHalves);
        ups[i] = __byte_perm(pair, next, kUpperHalves);
      }
    }
  }
};

// Adds the biases to gates and ups, and activates them, in the place of the gates. ups(i): those of
// the columns of gates i and i + 1, as a pair.
template <class Ups>
__device__ __forceinline__ void Activate(const GatedParams& params, const BlockTile& tile,
                                         float* gates, const Ups& ups) {
  const Biases biases(params, tile);
  silu::VisitKnown(params.activation, [&](const silu::Activation& activation) {
#pragma unroll
    for (uint32_t i = 0; i < kSums; i += 2) {
      const uint32_t gate_pair = add_rn_bf16x2(Rounded(gates, i), biases.gates[i / 4]);
      const float2 gate = p2p::UnpackPair(gate_pair, BFloat16{});
      const float2 up = p2p::UnpackPair(add_rn_bf16x2(ups(i), biases.ups[i / 4]), BFloat16{});
      gates[i] = activation.Apply(gate.x, up.x);
      gates[i + 1] = activation.Apply(gate.y, up.y);
    }
  });
}

// Encodes the values of a row.
class RowEncoder : public BlockEncoder {
 public:
  // `of_row`: 0 or 2, of the thread's rows. Called by one warp, converged.
  __device__ __forceinline__ RowEncoder(const float* values, uint32_t of_row)
      : BlockEncoder(Largest(values, of_row), BlockwiseScale{}) {}

 private:
  // The bits of the largest magnitude.
  __device__ __forceinline__ static uint32_t Largest(const float* values, uint32_t of_row) {
    uint32_t largest = 0;
#pragma unroll
    for (uint32_t i = 0; i < kSums; i += 4) {
      largest = max(largest,
                    max(MagnitudeBits(values[i + of_row]), MagnitudeBits(values[i + of_row + 1])));
    }
    largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
    return max(largest, __shfl_xor_sync(~0u, largest, 2));
  }
};

struct GatedTiles {
  using Params = GatedParams;
  using Self = Consumer<GatedTiles>;

  // The first block loads gates, the second one their ups.
  __device__ __forceinline__ static LoadedColumns Columns(const MatmulTile& tile, uint32_t rank) {
    return {static_cast<int>(tile.column / 2), static_cast<int>(rank)};
  }
  __device__ __forceinline__ static ColumnBlocks BlocksOf(const Params& params,
                                                          const MatmulTile& tile) {
    const uint32_t first = tile.column / kScaleBlock;
    if (params.is_interleaved) return {first, first + 1};
    return {first / 2, (params.n_columns / kScaleBlock + first) / 2};
  }
  __device__ __forceinline__ static RowScales ScalesOf(const Self& self,
                                                       const RowScales (&scales)[kHalves],
                                                       uint32_t half, uint32_t half_of_half) {
    const uint32_t block = self.params.is_interleaved ? half_of_half : half;
    return block == 0 ? scales[0] : scales[1];
  }

  __device__ __forceinline__ static void Store(const Self& self, const BlockTile& tile,
                                               float (&sums)[kHalves][kSums]) {
    Activate(self.params, tile, sums[0], [&](uint32_t i) { return Rounded(sums[1], i); });
    StoreCodes(self, tile, self.index * kGroupRows, sums[0]);
  }

  // The second warp group has the ups, and gives them to the first one, thread by thread.
  __device__ __forceinline__ static void StoreHalf(const Self& self, const BlockTile& tile,
                                                   float (&sums)[kHalves][kSums]) {
    constexpr int kComputing = kWarpGroups * kGroupThreads;
    constexpr uint32_t kStep = 32 * sizeof(uint32_t);
    const uint32_t ups = LinesOf(self, 1) + self.lane() * sizeof(uint32_t);
    if (self.index > 0) {
      __syncwarp();  // what the warp's lines held has been read
#pragma unroll
      for (uint32_t i = 0; i < kSums; i += 2) st_shared(ups + i / 2 * kStep, Rounded(sums[0], i));
    }
    barrier_sync(kUpsAreThere, kComputing);
    if (self.index == 0) {
      Activate(self.params, tile, sums[0],
               [&](uint32_t i) { return ld_shared(ups + i / 2 * kStep); });
    }
    barrier_sync(kUpsAreRead, kComputing);
    if (self.index == 0) StoreCodes(self, tile, 0, sums[0]);
  }

 private:
  static constexpr uint32_t kWarpRows = 16;
  static constexpr uint32_t kLinesBytes = kWarpRows * kScaleBlock;  // of a warp's codes
  static constexpr uint32_t kUpsBytes = 32 * kSums * 2;             // of a warp
  static constexpr int kUpsAreThere = 1, kUpsAreRead = 2;           // barriers
  static_assert(kUpsBytes >= kLinesBytes && 4 * (kLinesBytes + kUpsBytes) <= sizeof(Smem::results));

  // Where a warp of the warp group with this index has its lines of codes, or ups in their place.
  __device__ __forceinline__ static uint32_t LinesOf(const Self& self, uint32_t index) {
    const uint32_t results = self.smem + offsetof(Smem, results);
    if (index == 0) return results + self.warp() * kLinesBytes;
    return results + 4 * kLinesBytes + self.warp() * kUpsBytes;
  }

  // Of 64 rows, from `first_row` of the block's on.
  __device__ __forceinline__ static void StoreCodes(const Self& self, const BlockTile& tile,
                                                    uint32_t first_row, const float* values) {
    const RowEncoder first(values, 0), second(values, 2);
    const uint32_t lines = LinesOf(self, self.index);
    __syncwarp();  // what the lines held has been read
    WriteLines(lines, self.lane(), values, first, second);
    __syncwarp();
    StoreLines(self, tile, first_row + self.warp() * kWarpRows, lines);
    if (self.lane() % 4 > 0) return;
    const uint32_t row = first_row + self.row(), block = tile.column / kMatmulTileColumns;
    float* const scales = self.params.scales + size_t{block} * self.params.n_rows + tile.row;
    if (row < tile.n_rows) scales[row] = first.scale();
    if (row + 8 < tile.n_rows) scales[row + 8] = second.scale();
  }

  // A line has the 128 codes of a row, swizzled, of which each sixteen are out of order: a lane
  // writes two neighbors of the first eight columns, then two of the others.
  __device__ __forceinline__ static void WriteLines(uint32_t lines, uint32_t lane,
                                                    const float* values, const RowEncoder& first,
                                                    const RowEncoder& second) {
    const uint32_t line = lane % 16, to = lines + line * kLineBytes;
    const auto four = [&](const RowEncoder& row, uint32_t i) {
      return row.Encode(values[i], values[i + 1]) | row.Encode(values[i + 4], values[i + 5]) << 16;
    };
#pragma unroll
    for (uint32_t vector = 0; vector < kLineBytes / 16; vector += 2) {
      const uint32_t swizzled = (vector + lane / 16) ^ line % 8, i = vector * 8;
      stmatrix_x4(to + swizzled * 16, four(first, i), four(second, i + 2), four(first, i + 8),
                  four(second, i + 10));
    }
  }

  // Sixteen codes in order.
  __device__ __forceinline__ static int4 InOrder(const int4& codes) {
    const auto of = [](int a, int b, uint32_t halves) {
      return static_cast<int>(
          __byte_perm(static_cast<uint32_t>(a), static_cast<uint32_t>(b), halves));
    };
    return {of(codes.x, codes.y, kLowerHalves), of(codes.z, codes.w, kLowerHalves),
            of(codes.x, codes.y, kUpperHalves), of(codes.z, codes.w, kUpperHalves)};
  }

  __device__ __forceinline__ static void StoreLines(const Self& self, const BlockTile& tile,
                                                    uint32_t first_row, uint32_t lines) {
    constexpr uint32_t kVectors = kLineBytes / 16, kStep = 32 / kVectors;
    const uint32_t vector = self.lane() % kVectors, row_size = self.params.n_columns / 2;
#pragma unroll
    for (uint32_t i = 0; i < kWarpRows; i += kStep) {
      const uint32_t line = i + self.lane() / kVectors, row = first_row + line;
      const int4 codes = ld_shared_v4(lines + line * kLineBytes + (vector ^ line % 8) * 16);
      if (row >= tile.n_rows) return;
      const int64_t element = int64_t{tile.row + row} * row_size + tile.column / 2 + vector * 16;
      p2p::st_global(static_cast<uint8_t*>(self.params.out) + element, InOrder(codes));
    }
  }
};

}  // namespace jax_ep::matmul::scaled

namespace jax_ep::matmul::hopper {
namespace {

template <class Tiles>
__global__ void __launch_bounds__(scaled::kThreads, 1)
    MultiplyScaled(const __grid_constant__ typename Tiles::Params params, const uint32_t*) {
  scaled::Run<Tiles>(params);
}

template <class Tiles>
constexpr TileKernel<typename Tiles::Params> kKernel = {MultiplyScaled<Tiles>, scaled::kThreads,
                                                        scaled::kSmemBytes,
                                                        /*divides_evenly=*/false};

constexpr Swap kTiles = Swap::kLargeTiles;
static_assert(scaled::kTileRows == swapped::kLargeTileRows && scaled::kBlocks == swapped::kBlocks);

}  // namespace

cudaError_t LaunchScaled(const MatmulCall& call, LaunchMode mode) {
  return LaunchTiles(kKernel<scaled::PlainTiles>, call, mode, kTiles);
}

cudaError_t LaunchGatedScaled(const MatmulCall& call, const Gate& gate, LaunchMode mode) {
  return LaunchTiles(kKernel<scaled::GatedTiles>, call, mode, kTiles, gate);
}

}  // namespace jax_ep::matmul::hopper
