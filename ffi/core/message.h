// The wire format of dispatch: what one token carries to one destination rank. The bytes are the
// same for every destination of the token; each destination uses the choices that name its groups.
//
//   scales               padded to a multiple of 16 bytes; absent in formats without scales
//   payload              the bytes of one row
//   MessageChoice[N]
//   unused               up to a multiple of 128 bytes
//
// The token's index on its source rank travels as the value of the message's `arrived` word.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/host_device.h"

namespace jax_ep {

// Bytes of one access. Sizes of rows, payloads and scales are multiples of it.
constexpr size_t kVectorBytes = 16;

struct alignas(kVectorBytes) MessageChoice {
  int32_t group;     // group id, or kNoGroup
  int32_t position;  // among the source rank's choices of this group
  float weight;      // when topk_weights travel with the tokens
  int32_t unused;
};
static_assert(sizeof(MessageChoice) == kVectorBytes, "one access reads one choice");

constexpr size_t kMessageAlignment = 128;

JAX_EP_HOST_DEVICE constexpr size_t AlignUp(size_t size, size_t alignment) {
  return (size + alignment - 1) / alignment * alignment;
}

// Bytes of a token's scales and payload.
JAX_EP_HOST_DEVICE constexpr size_t TokenBytes(size_t scale_bytes, size_t payload_bytes) {
  return AlignUp(scale_bytes, kVectorBytes) + payload_bytes;
}

// `token_bytes`: scales and payload.
JAX_EP_HOST_DEVICE constexpr size_t MessageBytes(size_t token_bytes, size_t n_choices) {
  return AlignUp(token_bytes + n_choices * sizeof(MessageChoice), kMessageAlignment);
}

}  // namespace jax_ep
