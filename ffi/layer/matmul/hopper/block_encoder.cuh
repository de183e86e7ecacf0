// The scale of a block of elements, and how these become e4m3 codes with it.
#pragma once

#include <cstdint>

#include "core/quantize.h"

namespace jax_ep::matmul {

// BlockwiseFp8's scale of a block, from its largest magnitude.
struct BlockwiseScale {
  __device__ __forceinline__ float operator()(float amax) const {
    return BlockwiseFp8::EncodeScale(amax, InputScale{}).scale;
  }
};

class BlockEncoder {
 public:
  // `largest`: the bits of the largest magnitude; those of a NaN are the largest of all.
  // scale_of(amax): the scale; amax is finite.
  template <class ScaleOf>
  __device__ __forceinline__ BlockEncoder(uint32_t largest, const ScaleOf& scale_of) {
    is_dead_ = largest >= kFloatInfinity;
    const float amax = is_dead_ ? 0.0f : Bounded<BlockwiseFp8>(__uint_as_float(largest));
    scale_ = scale_of(amax);
    reciprocal_ = ReciprocalRn(scale_);
  }

  __device__ BlockEncoder(float scale, float reciprocal, bool is_dead)
      : is_dead_(is_dead), scale_(scale), reciprocal_(reciprocal) {}

  __device__ float scale() const { return scale_; }
  __device__ float reciprocal() const { return reciprocal_; }
  __device__ bool is_dead() const { return is_dead_; }

  // The codes of two elements, the first in the lower byte.
  __device__ __forceinline__ uint32_t Encode(float first, float second) const {
    const auto scaled = [&](float value) {
      return BlockwiseFp8::ScaleElement(is_dead_ ? 0.0f : value, scale_, reciprocal_);
    };
    return ToE4m3Pair(scaled(first), scaled(second));
  }

 private:
  bool is_dead_;  // encoded as zeros
  float scale_, reciprocal_;
};

}  // namespace jax_ep::matmul
