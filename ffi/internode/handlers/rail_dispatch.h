// How an intra-node dispatch distributes tokens while an inter-node exchange brings them.
#pragma once

#include <cstdint>

namespace jax_ep::rail {

// Blocks that send in such a dispatch: enough for the intra-node link. Equal on
// all ranks, as are the ranges of tokens that ranks send each other round robin.
constexpr int64_t kSendBlocks = 16;

// The ranges of tokens of a node: a block sends each.
constexpr int64_t RangesPerNode(int64_t n_nodes) {
  return n_nodes < kSendBlocks ? kSendBlocks / n_nodes : 1;
}

}  // namespace jax_ep::rail
