// LL packets, as in NCCL's low-latency protocol: how data travel in calls with few tokens. 16
// bytes, written and read atomically: three values of 4 bytes, and a flag, which is the number of
// the call (its epoch). As with epoch words, a packet with another epoch has not arrived yet.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jax_ep {

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
