// The sum of a token over all nodes.
#pragma once

#include <cstdint>
#include <type_traits>

#include "p2p/device/reduce.cuh"

namespace jax_ep::rail {

// The terms of the sum for a token of this rank.
struct NodeSums {
  int own;                  // node of this rank
  int n_nodes;              // N
  p2p::Addends addends;     // of the own node's sum
  const uint8_t* residual;  // or null

  // Whether the own node's sum is no more than a row, which need not be rounded.
  __device__ bool OwnIsRow() const { return __popc(addends.lanes) <= 1; }
  // The own node's row, or null if there is none. Called by one warp, converged.
  __device__ const uint8_t* OwnRow() const {
    if (addends.lanes == 0) return nullptr;
    return p2p::ShuffleAddress(addends.row, __ffs(addends.lanes) - 1);
  }
};

// The rows of a sum, in order, if the own node's sum is one of them: those of the nodes, then the
// residual. sum_of: see SumNodes.
template <class SumOf>
class RowsInOrder {
 public:
  __device__ RowsInOrder(const NodeSums& sums, const uint8_t* own_row, const SumOf& sum_of)
      : sums_(sums), own_row_(own_row), sum_of_(sum_of) {}

  // Null at the end.
  __device__ const uint8_t* Next() {
    while (node_ < sums_.n_nodes) {
      const int node = node_++;
      const uint8_t* const row = node == sums_.own ? own_row_ : sum_of_(node);
      if (row != nullptr) return row;
    }
    return node_++ == sums_.n_nodes ? sums_.residual : nullptr;
  }

 private:
  const NodeSums& sums_;
  const uint8_t* const own_row_;
  const SumOf& sum_of_;
  int node_ = 0;
};

// Adds the rows up; the next one is in flight while one is added.
template <class T, int kUnroll, class Rows>
__device__ void AddUp(Rows rows, int first, int end,
                      float (&total)[kUnroll][p2p::Elements<T>::kSize]) {
  int4 data[kUnroll], next[kUnroll];
  const uint8_t* row = rows.Next();
  if (row != nullptr) p2p::LoadVectors(row, first, end, data);
  while (row != nullptr) {
    row = rows.Next();
    if (row != nullptr) p2p::LoadVectors(row, first, end, next);
    p2p::AddVectors<T, false>(data, 1.0f, total);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) data[u] = next[u];
  }
}

// Adds up where the own node's sum has several rows, and is rounded before it is added.
template <class T, int kUnroll, class SumOf>
__device__ void AddUpRounded(const NodeSums& sums, const SumOf& sum_of, int first, int end,
                             float (&total)[kUnroll][p2p::Elements<T>::kSize]) {
  using Values = float[kUnroll][p2p::Elements<T>::kSize];
  const auto add = [&](const uint8_t* row, Values& values) {
    int4 data[kUnroll];
    p2p::LoadVectors(row, first, end, data);
    p2p::AddVectors<T, false>(data, 1.0f, values);
  };
  for (int node = 0; node < sums.n_nodes; ++node) {
    if (node == sums.own) {
      Values own = {};
      for (uint32_t left = sums.addends.lanes; left != 0; left &= left - 1) {
        add(p2p::ShuffleAddress(sums.addends.row, __ffs(left) - 1), own);
      }
      p2p::EndNode<T>(own, total);
    } else if (const uint8_t* const row = sum_of(node); row != nullptr) {
      add(row, total);
    }
  }
  if (sums.residual != nullptr) add(sums.residual, total);
}

// Writes this warp's slice of the sum to `to`: of the nodes' sums in node order, each rounded, and
// of the residual; rounded once more. sum_of(node) is the sum of another node, or null if that has
// no row of the token. Called by one warp, converged.
template <class T, class SumOf>
__device__ void SumNodes(const NodeSums& sums, const SumOf& sum_of, uint8_t* to, int n_vectors,
                         p2p::Slice slice) {
  using namespace p2p;
  const int end = slice.End(n_vectors);
  const auto for_each_piece = [&](auto unroll, const auto& add_up) {
    constexpr int kUnroll = decltype(unroll)::value;
    for (int first = slice.Begin(n_vectors) + LaneIndex(); first - LaneIndex() < end;
         first += kUnroll * kWarpSize) {
      float total[kUnroll][Elements<T>::kSize] = {};
      add_up(first, total);
      int4 rounded[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) rounded[u] = Pack(total[u], T{});
      StoreVectors(to, first, end, rounded);
    }
  };
  if (sums.OwnIsRow()) {
    const uint8_t* const own_row = sums.OwnRow();
    for_each_piece(std::integral_constant<int, 4>{}, [&](int first, auto& total) {
      AddUp<T>(RowsInOrder(sums, own_row, sum_of), first, end, total);
    });
  } else {
    for_each_piece(std::integral_constant<int, 2>{}, [&](int first, auto& total) {
      AddUpRounded<T>(sums, sum_of, first, end, total);
    });
  }
}

}  // namespace jax_ep::rail
