// Messages of a token that are leaving a stage by bulk copies, one per rank.
#pragma once

#include <cstdint>

#include "p2p/device/peer.cuh"
#include "p2p/device/ptx.cuh"

namespace jax_ep::p2p {

// The word that publishes a message, and its value.
struct MessageSignal {
  PeerWord word;
  uint32_t token;
};

// Messages that are leaving a stage: at most one per lane.
class InFlightMessages {
 public:
  __device__ void Add(const MessageSignal& signal) { signal_ = signal; }

  // Waits until this lane's message has been written, and signals it.
  __device__ void Finish(uint32_t epoch) {
    cp_async_bulk_wait_group<0>();
    if (signal_.word.exists()) Signal(signal_.word, epoch, signal_.token);
    signal_.word = {};
  }

 private:
  MessageSignal signal_ = {};
};

}  // namespace jax_ep::p2p
