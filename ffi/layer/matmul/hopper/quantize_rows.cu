// Quantizes rows along rows and along columns in one pass.
//
// A block of threads has a block of up to 128 rows of a group, and takes 128 columns at a time. A
// thread has 8 x 8 neighboring elements of these, and so writes eight codes of a column at once.
// Shared memory joins those of 16 threads to lines of 128.

#include <cuda_runtime.h>

#include <cstdint>

#include "core/quantize.h"
#include "layer/matmul/fp8_gradient.h"
#include "layer/matmul/hopper/block_encoder.cuh"
#include "layer/matmul/row_range.cuh"
#include "p2p/device/ptx.cuh"
#include "p2p/device/reduce.cuh"
#include "p2p/launch/launch.h"

namespace jax_ep::matmul::hopper {
namespace {

constexpr uint32_t kSize = kMatmulScaleBlock;  // rows, and columns, of a tile
constexpr uint32_t kEdge = 8;                  // of a thread's elements
constexpr uint32_t kRowThreads = kSize / kEdge;
constexpr uint32_t kThreads = kRowThreads * kRowThreads;
constexpr uint32_t kWarps = kThreads / 32;
constexpr uint32_t kTilesOfBlock = 4;  // that a block takes, one after the other

// Column kEdge * i + j of a tile is at kRowThreads * j + i, so that neighboring threads, which have
// different i, find theirs next to each other.
struct Smem {
  uint32_t largest[kWarps][kSize];  // bits of magnitudes
  float2 columns[kSize];            // scale, and its reciprocal, or 0 if the block is dead
  uint8_t codes[kSize][kSize];      // a line per column, in order; units of kEdge rows are swizzled
};

// The scale of a block of gradients: BlockwiseFp8's, but for its lower bound.
struct GradientScale {
  __device__ __forceinline__ float operator()(float amax) const {
    const float floored = fmaxf(amax, kMinGradientAmax);
    if (IsModerate(floored)) return BlockwiseFp8::EncodeScaleFast(floored, InputScale{}).scale;
    return DivideRn(floored, 448.0f);
  }
};

// Eight neighbors in a row, of bfloat16.
struct Numbers {
  uint4 pairs{};

  __device__ __forceinline__ void Load(const QuantizeCall& call, int64_t row, int64_t column) {
    const auto* const rows = static_cast<const uint16_t*>(call.rows);
    pairs = __ldg(reinterpret_cast<const uint4*>(rows + row * call.n + column));
  }
  // Numbers i and i + 1; i is even.
  __device__ __forceinline__ float2 Pair(uint32_t i) const {
    const uint32_t words[] = {pairs.x, pairs.y, pairs.z, pairs.w};
    return p2p::UnpackPair(words[i / 2], BFloat16{});
  }
};

// The same, of codes along rows.
struct RowOfCodes {
  uint2 codes{};
  float scale = 0;

  __device__ __forceinline__ void Load(const QuantizeCall& call, int64_t row, int64_t column) {
    const auto* const rows = static_cast<const uint8_t*>(call.rows);
    codes = __ldg(reinterpret_cast<const uint2*>(rows + row * call.n + column));
    scale = __ldg(call.scales + column / kSize * call.n_rows + row);
  }
  __device__ __forceinline__ float2 Pair(uint32_t i) const {
    const auto pair = static_cast<uint16_t>((i < 4 ? codes.x : codes.y) >> i % 4 * 8);
    uint32_t halves = 0;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    const float2 numbers = p2p::UnpackPair(halves, Float16{});
    return {__fmul_rn(numbers.x, scale), __fmul_rn(numbers.y, scale)};
  }
};

// The rows of a block: none, if the groups have fewer blocks. Called by all threads.
struct BlockRows {
  uint32_t first, size;

  __device__ static BlockRows Find(const QuantizeCall& call, uint32_t block) {
    __shared__ BlockRows found;
    __shared__ uint32_t warp_sums[kWarps];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) found = {0, 0};
    uint32_t before = 0;  // blocks of the groups before these
    for (int64_t base = 0; base < call.n_groups && before <= block; base += kThreads) {
      const int64_t group = base + threadIdx.x;
      const RowRange rows = group < call.n_groups ? RowRange::Of(call, group) : RowRange{0, 0};
      const auto size = static_cast<uint32_t>(rows.size), n_blocks = (size + kSize - 1) / kSize;
      uint32_t end = n_blocks;
#pragma unroll
      for (uint32_t step = 1; step < 32; step *= 2) {
        const uint32_t other = __shfl_up_sync(~0u, end, step);
        if (lane >= step) end += other;
      }
      if (lane == 31) warp_sums[warp] = end;
      __syncthreads();
      end += before;
      for (uint32_t i = 0; i < kWarps; ++i) {
        if (i < warp) end += warp_sums[i];
        before += warp_sums[i];
      }
      if (block < end && block + n_blocks >= end) {
        const uint32_t skipped = (block + n_blocks - end) * kSize;
        found = {static_cast<uint32_t>(rows.first) + skipped, min(size - skipped, kSize)};
      }
      __syncthreads();
    }
    return found;
  }
};

__device__ __forceinline__ uint32_t Larger(uint32_t bits, float2 pair) {
  return max(bits, max(MagnitudeBits(pair.x), MagnitudeBits(pair.y)));
}

// A thread's elements of a tile. Row: Numbers or RowOfCodes.
template <class Row>
struct Tile {
  const QuantizeCall& call;
  BlockRows rows;
  uint32_t block, column;  // the tile's first
  Row values[kEdge];

  __device__ static uint32_t row() { return threadIdx.x / kRowThreads * kEdge; }
  __device__ static uint32_t lane() { return threadIdx.x % kRowThreads; }

  __device__ __forceinline__ void Load() {
#pragma unroll
    for (uint32_t i = 0; i < kEdge; ++i) {
      if (row() + i >= rows.size) continue;
      values[i].Load(call, int64_t{rows.first} + row() + i, column + lane() * kEdge);
    }
  }

  __device__ __forceinline__ void StoreAlongRows() const {
#pragma unroll
    for (uint32_t i = 0; i < kEdge; ++i) {
      uint32_t largest = 0;
#pragma unroll
      for (uint32_t j = 0; j < kEdge; j += 2) largest = Larger(largest, values[i].Pair(j));
#pragma unroll
      for (uint32_t other = 1; other < kRowThreads; other *= 2) {
        largest = max(largest, __shfl_xor_sync(~0u, largest, other));
      }
      const BlockEncoder encoder(largest, GradientScale{});
      const auto encode = [&](uint32_t j) {
        const float2 pair = values[i].Pair(j);
        return encoder.Encode(pair.x, pair.y);
      };
      if (row() + i >= rows.size) continue;
      const int64_t at = int64_t{rows.first} + row() + i;
      uint8_t* const to = call.along_rows.codes + at * call.n + column + lane() * kEdge;
      *reinterpret_cast<uint2*>(to) = {encode(0) | encode(2) << 16, encode(4) | encode(6) << 16};
      if (lane() == 0) call.along_rows.scales[column / kSize * call.n_rows + at] = encoder.scale();
    }
  }

  __device__ __forceinline__ void StoreAlongColumns(Smem& smem) const {
    ReduceColumns(smem);
    __syncthreads();
    if (threadIdx.x < kSize) EncodeScales(smem);
    __syncthreads();
    WriteLines(smem);
    __syncthreads();
    StoreLines(smem);
  }

 private:
  __device__ __forceinline__ void ReduceColumns(Smem& smem) const {
    uint32_t* const of_warp = smem.largest[threadIdx.x / 32];
#pragma unroll
    for (uint32_t j = 0; j < kEdge; j += 2) {
      uint32_t first = 0, second = 0;
#pragma unroll
      for (uint32_t i = 0; i < kEdge; ++i) {
        const float2 pair = values[i].Pair(j);
        first = max(first, MagnitudeBits(pair.x)), second = max(second, MagnitudeBits(pair.y));
      }
      first = max(first, __shfl_xor_sync(~0u, first, kRowThreads));
      second = max(second, __shfl_xor_sync(~0u, second, kRowThreads));
      // The lower half of the warp stores one, the upper half the other.
      const bool is_upper = threadIdx.x % 32 >= kRowThreads;
      of_warp[(j + is_upper) * kRowThreads + lane()] = is_upper ? second : first;
    }
  }

  __device__ __forceinline__ void EncodeScales(Smem& smem) const {
    const uint32_t i = threadIdx.x, in_tile = i % kRowThreads * kEdge + i / kRowThreads;
    uint32_t largest = 0;
#pragma unroll
    for (const auto& of_warp : smem.largest) largest = max(largest, of_warp[i]);
    const BlockEncoder encoder(largest, GradientScale{});
    smem.columns[i] = {encoder.scale(), encoder.is_dead() ? 0.0f : encoder.reciprocal()};
    call.along_columns.scales[int64_t{block} * call.n + column + in_tile] = encoder.scale();
  }

  __device__ __forceinline__ void WriteLines(Smem& smem) const {
    const uint32_t unit = row() / kEdge ^ lane();
#pragma unroll
    for (uint32_t j = 0; j < kEdge; j += 2) {
      const BlockEncoder first = EncoderOf(smem, j), second = EncoderOf(smem, j + 1);
      uint32_t words[2][2];  // of both columns
#pragma unroll
      for (uint32_t i = 0; i < kEdge; i += 4) {
        const float2 a = values[i].Pair(j), b = values[i + 1].Pair(j);
        const float2 c = values[i + 2].Pair(j), d = values[i + 3].Pair(j);
        words[0][i / 4] = first.Encode(a.x, b.x) | first.Encode(c.x, d.x) << 16;
        words[1][i / 4] = second.Encode(a.y, b.y) | second.Encode(c.y, d.y) << 16;
      }
#pragma unroll
      for (uint32_t k = 0; k < 2; ++k) {
        uint8_t* const line = smem.codes[lane() * kEdge + j + k];
        *reinterpret_cast<uint2*>(line + unit * kEdge) = {words[k][0], words[k][1]};
      }
    }
  }

  __device__ __forceinline__ static BlockEncoder EncoderOf(const Smem& smem, uint32_t j) {
    const float2 scale = smem.columns[j * kRowThreads + lane()];
    return {scale.x, scale.y, scale.y == 0.0f};
  }

  __device__ __forceinline__ void StoreLines(const Smem& smem) const {
    constexpr uint32_t kVectors = kSize / 16;
    const int64_t line_size = MaxRowBlocks(call.n_rows, call.n_groups) * kSize;
#pragma unroll
    for (uint32_t i = threadIdx.x; i < kSize * kVectors; i += kThreads) {
      const uint32_t line = i / kVectors, vector = i % kVectors, swizzle = line / kEdge;
      uint4 codes = *reinterpret_cast<const uint4*>(smem.codes[line] + (vector ^ swizzle / 2) * 16);
      if (swizzle % 2 != 0) codes = {codes.z, codes.w, codes.x, codes.y};
      const int64_t at = (column + line) * line_size + int64_t{block} * kSize + vector * 16;
      *reinterpret_cast<uint4*>(call.along_columns.codes + at) = codes;
    }
  }
};

template <class Row>
__global__ void __launch_bounds__(kThreads, 3)
    QuantizeRows(const __grid_constant__ QuantizeCall call) {
  __shared__ __align__(16) Smem smem;
  const BlockRows rows = BlockRows::Find(call, blockIdx.x);
  if (rows.size == 0) return;
  const int64_t first = int64_t{blockIdx.y} * kTilesOfBlock * kSize;
  const int64_t end = min(first + int64_t{kTilesOfBlock} * kSize, call.n);
  for (int64_t column = first; column < end; column += kSize) {
    Tile<Row> tile{call, rows, blockIdx.x, static_cast<uint32_t>(column), {}};
    tile.Load();
    if (call.along_rows.codes != nullptr) tile.StoreAlongRows();
    if (call.along_columns.codes != nullptr) tile.StoreAlongColumns(smem);
  }
}

}  // namespace

cudaError_t LaunchQuantizeRows(const QuantizeCall& call, LaunchMode mode) {
  if (mode.only_loads()) return LoadAhead(QuantizeRows<Numbers>, QuantizeRows<RowOfCodes>);
  const int64_t n_blocks = MaxRowBlocks(call.n_rows, call.n_groups);
  const int64_t n_tiles = (call.n / kSize + kTilesOfBlock - 1) / kTilesOfBlock;
  if (call.n % kSize != 0 || n_blocks > INT32_MAX / kSize || n_tiles > UINT16_MAX) {
    return cudaErrorInvalidValue;
  }
  const dim3 grid(static_cast<unsigned>(n_blocks), static_cast<unsigned>(n_tiles));
  const p2p::LaunchShape shape{grid, kThreads, 0, mode.stream()};
  return p2p::LaunchKernel(
      call.scales != nullptr ? QuantizeRows<RowOfCodes> : QuantizeRows<Numbers>, shape, call);
}

}  // namespace jax_ep::matmul::hopper
