// The wire format of dispatch: what a token brings to one destination rank. The bytes are the same
// for every destination of the token; each takes the choices that name its experts.
//
//   scales, up to a multiple of 16 bytes     of formats that have any
//   payload                                  a row's bytes
//   MessageChoice[K]
//   up to a multiple of 128 bytes            unused
//
// The index of the token on its source rank is the value of the message's ready word.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/host_device.h"

namespace jax_ep {

// What moves at once; sizes of rows are multiples of it.
constexpr size_t kVectorBytes = 16;

struct alignas(kVectorBytes) MessageChoice {
  int32_t expert;    // global id, kNoExpert for none
  int32_t position;  // among the source rank's choices of this expert
  float weight;      // where topk_weights travel with the tokens
  int32_t unused;
};
static_assert(sizeof(MessageChoice) == kVectorBytes, "one choice is one access");

constexpr size_t kMessageAlignment = 128;

JAX_EP_HOST_DEVICE constexpr size_t AlignUp(size_t size, size_t alignment) {
  return (size + alignment - 1) / alignment * alignment;
}

JAX_EP_HOST_DEVICE constexpr size_t MessageBytes(size_t token_bytes, size_t top_k) {
  return AlignUp(token_bytes + top_k * sizeof(MessageChoice), kMessageAlignment);
}

}  // namespace jax_ep
