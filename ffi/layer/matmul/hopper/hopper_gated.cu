// The grouped matmul of bfloat16 with the activation of its result, for Hopper: hopper_swapped.cuh
// with other tiles. A warp group's 64 columns are 32 gates and their ups, so that it needs no
// other.

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "core/float_types.h"
#include "layer/activation/silu_input.cuh"
#include "layer/matmul/gated.h"
#include "layer/matmul/hopper/hopper_swapped.cuh"
#include "layer/matmul/hopper/tile_launch.cuh"
#include "p2p/device/reduce.cuh"

namespace jax_ep::matmul::swapped {

constexpr uint32_t kGroupGates = kGroupColumns / 2;  // of a warp group

// Lines of 32 gates, then lines of their ups.
struct LinesApart {
  static constexpr uint32_t kLine = kGroupGates * 2;
  using Operand = WgmmaOperand<kLine, kDepth * kLine>;
  static constexpr bool kAlongColumns = true;
  static constexpr uint32_t kStepBytes = kStepTerms * kLine;

  __device__ __forceinline__ static void Load(uint32_t to, const CUtensorMap* weights, int column,
                                              int k, uint32_t group, uint32_t barrier,
                                              uint64_t policy) {
    cp_async_bulk_tensor(to, weights, column / 2, k, 0, static_cast<int>(group), barrier, policy);
  }
};

__device__ __forceinline__ float2 ToFloats(int pair) {
  return p2p::UnpackPair(static_cast<uint32_t>(pair), BFloat16{});
}

__device__ __forceinline__ void ToFloats(int2 pairs, float (&values)[4]) {
  const float2 first = ToFloats(pairs.x), second = ToFloats(pairs.y);
  values[0] = first.x, values[1] = first.y, values[2] = second.x, values[3] = second.y;
}

// Four neighboring gates and their ups, from a line of results at `line`.
template <bool kIsInterleaved>
__device__ __forceinline__ void LoadGates(uint32_t line, uint32_t swizzle, uint32_t four,
                                          float (&gates)[4], float (&ups)[4]) {
  if constexpr (kIsInterleaved) {
    const int4 pairs = ld_shared_v4(line + (four ^ swizzle) * 16);
    const int words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = ToFloats(words[i]);
      gates[i] = pair.x, ups[i] = pair.y;
    }
  } else {
    constexpr uint32_t kGateVectors = kGroupGates / 8;
    const uint32_t vector = four / 2, half = four % 2 * 8;
    ToFloats(ld_shared_v2(line + (vector ^ swizzle) * 16 + half), gates);
    ToFloats(ld_shared_v2(line + ((vector + kGateVectors) ^ swizzle) * 16 + half), ups);
  }
}

// One of a warp group's 64 columns, by its place in the lines: of 32 gates and 32 ups that lie
// apart, or of whole lines. At least n_columns: there is none.
template <bool kIsInterleaved>
__device__ __forceinline__ uint32_t ColumnAt(const Consumer& self, const MatmulTile& tile,
                                             uint32_t at) {
  const uint32_t group = self.rank * kWarpGroups + self.index;
  if constexpr (kIsInterleaved) return tile.column + group * kGroupColumns + at;
  const uint32_t row_size = self.params.n_columns / 2;
  const uint32_t gate = tile.column / 2 + group * kGroupGates + at % kGroupGates;
  if (gate >= row_size) return self.params.n_columns;
  return at < kGroupGates ? gate : row_size + gate;
}

// What gives the sums their bias. Without one, it is -0, to which any number can be added without a
// change of its bits.
template <bool kIsInterleaved>
__device__ __forceinline__ BiasedPairs LoadBiases(const Consumer& self, const MatmulTile& tile) {
  const auto& params = static_cast<const GatedParams&>(self.params);
  const auto* const bias = static_cast<const uint16_t*>(params.bias);
  const uint32_t first = self.thread / 32 * 16 + self.thread % 32 / 4;
  const auto load = [&](uint32_t at) -> uint32_t {
    const uint32_t column = ColumnAt<kIsInterleaved>(self, tile, at);
    if (bias == nullptr || column >= params.n_columns) return 0x8000;
    return __ldg(bias + int64_t{tile.group()} * params.n_columns + column);
  };
  return {{load(first), load(first + 8)}};
}

// Activates the lines of `buffer` that are rows of the tile from `first` on, and stores the values.
// A thread takes four columns at a time; lines of the same half warp are four apart, so that their
// gates lie in different banks.
template <bool kIsInterleaved>
__device__ __forceinline__ void StoreActivated(const Consumer& self, uint32_t buffer,
                                               const MatmulTile& tile, uint32_t first) {
  constexpr uint32_t kFours = kGroupGates / 4, kStep = kGroupThreads / kFours;
  const uint32_t row_size = self.params.n_columns / 2;
  const uint32_t four = self.thread % kFours;
  const uint32_t line = self.thread / kFours % 4 * 4 + self.thread / 32;
  const uint32_t group = self.rank * kWarpGroups + self.index;
  const uint32_t column = tile.column / 2 + group * kGroupGates + four * 4;
  const int64_t element = int64_t{tile.row + first + line} * row_size + column;
  char* const out = static_cast<char*>(self.params.out) + element * 2;
  const auto store = [&](const silu::Activation& activation) {
#pragma unroll
    for (uint32_t i = 0; i < kStoreRows; i += kStep) {
      float gates[4], ups[4], values[4];
      LoadGates<kIsInterleaved>(buffer + (i + line) * kLineBytes, line % 8, four, gates, ups);
#pragma unroll
      for (int k = 0; k < 4; ++k) values[k] = activation.Apply(gates[k], ups[k]);
      if (first + line + i < tile.n_rows && column < row_size) {
        const uint2 packed = {p2p::PackPair(values[0], values[1], BFloat16{}),
                              p2p::PackPair(values[2], values[3], BFloat16{})};
        *reinterpret_cast<uint2*>(out + int64_t{i} * row_size * 2) = packed;
      }
    }
  };
  silu::VisitKnown(static_cast<const GatedParams&>(self.params).activation, store);
}

// The result is the activation of the sums, which are first rounded to bfloat16, and once more with
// the bias.
template <bool kIsInterleaved>
struct GatedTiles {
  using Weights = std::conditional_t<kIsInterleaved, WholeLines, LinesApart>;

  // The code that activates exists once, not for each number of rows, so that it stays in the
  // instruction cache.
  __device__ __forceinline__ static void Compute(Consumer& self, const MatmulTile& tile,
                                                 uint32_t units) {
    const BiasedPairs pack = LoadBiases<kIsInterleaved>(self, tile);  // while others still load
    float sums[kLargeTileRows / 2] = {};
    VisitUnits<1, kLargeTileRows / kRowUnit>(units, [&](auto n) {
      constexpr int kN = decltype(n)::value * kRowUnit;
      Multiply<Weights, kN>(self, sums);
    });
    Store<0>(self, tile, sums, pack);
  }

 private:
  template <int kFirst>
  __device__ __forceinline__ static void Store(Consumer& self, const MatmulTile& tile,
                                               const float* sums, const BiasedPairs& pack) {
    constexpr int kEnd = kLargeTileRows;
    if constexpr (kFirst < kEnd) {
      if (kFirst >= tile.n_rows) return;
      const uint32_t buffer = NextLines<kFirst, kEnd>(self, sums, pack);
      void* const hidden = static_cast<const GatedParams&>(self.params).hidden;
      if (hidden != nullptr) {
        const uint32_t at = self.thread % kLineVectors * 8;
        const uint32_t column = ColumnAt<kIsInterleaved>(self, tile, at);
        StoreLines(self, buffer, tile, kFirst, hidden, column);
      }
      StoreActivated<kIsInterleaved>(self, buffer, tile, kFirst);
      Store<kFirst + static_cast<int>(kStoreRows)>(self, tile, sums, pack);
    }
  }
};

}  // namespace jax_ep::matmul::swapped

namespace jax_ep::matmul::hopper {
namespace {

template <bool kIsInterleaved>
using GatedKernel = swapped::TileKernel<swapped::GatedTiles<kIsInterleaved>>;

template <bool kIsInterleaved>
__global__ void __launch_bounds__(GatedKernel<kIsInterleaved>::MaxThreadsPerBlock, 1)
    MultiplyAndActivate(const __grid_constant__ swapped::GatedParams params,
                        const uint32_t* tile_rows) {
  extern __shared__ char smem[];
  GatedKernel<kIsInterleaved>{}(params, tile_rows, smem);
}

}  // namespace

cudaError_t LaunchGated(const MatmulCall& call, const Gate& gate, LaunchMode mode, Swap swap) {
  const auto kernel = gate.is_interleaved ? MultiplyAndActivate<true> : MultiplyAndActivate<false>;
  const int n_threads = swapped::Kernel::MaxThreadsPerBlock;
  return LaunchTiles(TileKernel<swapped::GatedParams>{kernel, n_threads, swapped::kSmemBytes}, call,
                     mode, swap, gate);
}

}  // namespace jax_ep::matmul::hopper
