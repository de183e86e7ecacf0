// The sum of a token over all nodes.
#pragma once

#include <cstdint>

#include "cuda/device/reduce.cuh"

namespace jax_ep::rail {

// What is added up for a token of this rank.
struct NodeSums {
  int own;                  // node of this rank
  int n_nodes;              // N
  p2p::Addends addends;     // of the own node's sum
  const uint8_t* residual;  // or null
};

// Writes this warp's slice of the sum to `to`: of the nodes' sums in node order, each rounded, and
// of the residual; rounded once more. sum_of(node) is the sum of another node, or null if that has
// no row of the token. Called by one warp, converged.
template <class T, class SumOf>
__device__ void SumNodes(const NodeSums& sums, const SumOf& sum_of, uint8_t* to, int n_vectors,
                         p2p::Slice slice) {
  using namespace p2p;
  constexpr int kUnroll = 2, kSize = Elements<T>::kSize;
  const int end = slice.End(n_vectors);
  for (int first = slice.Begin(n_vectors) + LaneIndex(); first - LaneIndex() < end;
       first += kUnroll * kWarpSize) {
    float total[kUnroll][kSize] = {};
    int4 data[kUnroll];
    const auto add = [&](const uint8_t* row, float (&values)[kUnroll][kSize]) {
      LoadVectors(row, first, end, data);
      AddVectors<T, false>(data, 1.0f, values);
    };
    for (int node = 0; node < sums.n_nodes; ++node) {
      if (node == sums.own) {
        float own[kUnroll][kSize] = {};
        for (uint32_t left = sums.addends.lanes; left != 0; left &= left - 1) {
          add(ShuffleAddress(sums.addends.row, __ffs(left) - 1), own);
        }
        EndNode<T>(own, total);
      } else if (const uint8_t* const row = sum_of(node); row != nullptr) {
        add(row, total);
      }
    }
    if (sums.residual != nullptr) add(sums.residual, total);
    int4 rounded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) rounded[u] = Pack(total[u], T{});
    StoreVectors(to, first, end, rounded);
  }
}

}  // namespace jax_ep::rail
