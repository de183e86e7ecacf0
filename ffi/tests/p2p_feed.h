// A stand-in for an exchange between nodes: a kernel that brings tokens at the rate of a link, while
// a dispatch of them runs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jax_ep::p2p {

struct Feed {
  const uint8_t* from;  // the tokens that arrive
  uint8_t* to;
  uint8_t* other;      // as much memory, written as by a peer
  uint32_t* arrived;   // [n_tiles]
  int32_t n_tokens;
  int32_t token_bytes;
  int32_t tile_tokens;
  int32_t n_streams;   // tiles arrive in the order of a matrix [n_streams, n_tiles / n_streams] read by columns
  float gb_s;
};

cudaError_t LaunchFeed(const Feed& feed, cudaStream_t stream);

}  // namespace jax_ep::p2p
