// What becomes of a lane's activations: numbers of a plain format, or codes and scales.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/e2m1.h"
#include "core/quantize.h"
#include "core/scales_layout.h"
#include "core/silu_call.h"
#include "cuda/device/silu_input.cuh"

namespace jax_ep::p2p {

// A row: where it stands among the rows and, where that matters, in its group.
struct SiluRow {
  uint32_t index;
  uint32_t in_group;
  uint32_t first_block;  // of the group
  InputScale input_scale;
};

// Of a lane's values among those of all rows, which are fewer than 2^32 times kLaneValues.
__device__ __forceinline__ uint32_t LaneIndexIn(const SiluCall& call, const SiluRow& row,
                                                uint32_t column) {
  return row.index * static_cast<uint32_t>(call.row_size / kLaneValues) + column / kLaneValues;
}

// The row as it is.
struct PlainOutput {
  static constexpr bool kQuantises = false;

  __device__ static void Store(const SiluCall& call, const SiluRow& row, uint32_t column,
                               bool has_column, const float (&values)[kLaneValues]) {
    if (!has_column) return;
    const int64_t first = int64_t{LaneIndexIn(call, row, column)} * kLaneValues;
    if (call.out_type == RowType::kFloat32) {
      float4* const out = reinterpret_cast<float4*>(static_cast<float*>(call.out) + first);
      __stcs(out, make_float4(values[0], values[1], values[2], values[3]));
      __stcs(out + 1, make_float4(values[4], values[5], values[6], values[7]));
      return;
    }
    const bool is_bfloat16 = call.out_type == RowType::kBFloat16;
    const int4 packed = is_bfloat16 ? Pack(values, BFloat16{}) : Pack(values, Float16{});
    __stcs(reinterpret_cast<int4*>(static_cast<uint16_t*>(call.out) + first), packed);
  }
};

// Codes, and a scale for the elements of neighbouring lanes.
template <class Format>
struct QuantisedOutput {
  static constexpr bool kQuantises = true;
  using Scale = typename Format::Scale;

  // Called by a whole warp, converged.
  __device__ static void Store(const SiluCall& call, const SiluRow& row, uint32_t column,
                               bool has_column, float (&values)[kLaneValues]) {
    float largest = fabsf(values[0]);
#pragma unroll
    for (int i = 1; i < kLaneValues; ++i) largest = MaxNan(largest, fabsf(values[i]));
#pragma unroll
    for (int lane = Format::kBlockSize / kLaneValues / 2; lane > 0; lane /= 2) {
      largest = MaxNan(largest, __shfl_xor_sync(0xffffffffu, largest, lane));
    }
    const bool is_dead = !(FloatBits(largest) < kFloatInfinity);
    if (__any_sync(0xffffffffu, is_dead)) {
#pragma unroll
      for (float& value : values) value = is_dead ? 0.0f : value;
      largest = is_dead ? 0.0f : largest;
    }
    const auto block = Format::EncodeScale(largest, row.input_scale);
#pragma unroll
    for (float& value : values) value = Format::ScaleElement(value, block.factor);
    if (!has_column) return;
    StoreCodes(call, LaneIndexIn(call, row, column), values);
    if (column % Format::kBlockSize != 0) return;
    StoreScale(call, row, column / Format::kBlockSize, block.scale);
  }

 private:
  __device__ static void StoreCodes(const SiluCall& call, uint32_t index,
                                    const float (&values)[kLaneValues]) {
    if constexpr (Format::kIsPacked) {
      __stcs(static_cast<uint32_t*>(call.out) + index, ToE2m1Word(values));
    } else {
      const auto word = [&](int i) {
        return ToE4m3Pair(values[i], values[i + 1]) |
               uint32_t{ToE4m3Pair(values[i + 2], values[i + 3])} << 16;
      };
      __stcs(static_cast<uint2*>(call.out) + index, make_uint2(word(0), word(4)));
    }
  }

  // Scales are fewer than 2^32.
  __device__ static void StoreScale(const SiluCall& call, const SiluRow& row, uint32_t index,
                                    Scale scale) {
    Scale* const scales = static_cast<Scale*>(call.scales);
    const uint32_t n_scales = static_cast<uint32_t>(call.n_scales);
    if (call.scales_layout == ScalesLayout::kRowMajor) {
      scales[row.index * n_scales + index] = scale;
    } else if (call.scales_layout == ScalesLayout::kTransposed) {
      scales[index * static_cast<uint32_t>(call.n_rows) + row.index] = scale;
    } else {
      constexpr uint32_t kRows = kAtomRows, kScales = kAtomScales, kBytes = kAtomBytes;
      const uint32_t n_atoms = (n_scales + kScales - 1) / kScales;
      const uint32_t block = row.first_block + row.in_group / kRows;
      // As AtomOffset, of 32 bits.
      const uint32_t in_atom = row.in_group % 32 * 16 + row.in_group % kRows / 32 * kScales;
      Scale* const atom = scales + ((block * n_atoms + index / kScales) * kBytes + in_atom);
      atom[index % kScales] = scale;
      if (n_scales % kScales == 0 || index != n_scales - 1) return;
#pragma unroll
      for (uint32_t i = 1; i < kScales; ++i) {
        if (i > index % kScales) atom[i] = 0;
      }
    }
  }
};

}  // namespace jax_ep::p2p
