// What travels between ranks: messages, epoch words and LL packets.
//
// The message of dispatch is what one token carries to one destination rank. The bytes are the
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

// Epoch words: how ranks signal each other. 64 bits, read and written atomically: the number of the
// call (its epoch) in the upper half, a value in the lower half. A word with another epoch has not
// arrived yet, so words are never cleared between calls.

JAX_EP_HOST_DEVICE constexpr uint64_t MakeEpochWord(uint32_t epoch, uint32_t value) {
  return static_cast<uint64_t>(epoch) << 32 | value;
}

JAX_EP_HOST_DEVICE constexpr bool IsOfEpoch(uint64_t word, uint32_t epoch) {
  return static_cast<uint32_t>(word >> 32) == epoch;
}

JAX_EP_HOST_DEVICE constexpr uint32_t EpochWordValue(uint64_t word) {
  return static_cast<uint32_t>(word);
}

// LL packets, as in NCCL's low-latency protocol: how data travel in calls with few tokens. 16
// bytes, written and read atomically: three values of 4 bytes, and a flag, which is the number of
// the call (its epoch). As with epoch words, a packet with another epoch has not arrived yet.

struct alignas(16) LLPacket {
  uint32_t values[3];
  uint32_t epoch;
};

constexpr size_t kPacketDataBytes = 3 * sizeof(uint32_t);

// Packets that carry `bytes` bytes.
constexpr size_t PacketsOf(size_t bytes) {
  return (bytes + kPacketDataBytes - 1) / kPacketDataBytes;
}

}  // namespace jax_ep
