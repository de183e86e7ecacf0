// How a dispatch inside a node shares out the tokens that an exchange between nodes brings
// meanwhile.
#pragma once

#include <cstdint>

namespace jax_ep::rail {

// Blocks that send in such a dispatch: enough for the link inside a node. As the ranges of tokens
// that the ranks bring each other in turn, the same on all.
constexpr int64_t kSendBlocks = 16;

// The ranges of tokens of a node: a block sends each.
constexpr int64_t RangesPerNode(int64_t n_nodes) {
  return n_nodes < kSendBlocks ? kSendBlocks / n_nodes : 1;
}

}  // namespace jax_ep::rail
