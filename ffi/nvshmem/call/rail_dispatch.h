// How an intra-node dispatch distributes tokens while an inter-node exchange brings them.
#pragma once

#include <cstdint>

namespace jax_ep::rail {

// Blocks that send in such a dispatch: enough for the intra-node link, or a third of those of an
// asynchronous call. Equal on all ranks, as are the ranges of tokens that ranks send each other
// round robin.
constexpr int64_t SendBlocks(bool is_async) { return is_async ? 8 : 16; }

// The ranges of tokens of a node: a block sends each.
constexpr int64_t RangesPerNode(int64_t n_nodes, bool is_async) {
  return n_nodes < SendBlocks(is_async) ? SendBlocks(is_async) / n_nodes : 1;
}

}  // namespace jax_ep::rail
