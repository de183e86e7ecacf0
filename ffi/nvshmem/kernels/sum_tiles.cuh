// The sum of a token over all nodes, and tiles of sums, by all warps of a block.
#pragma once

#include <cstdint>
#include <type_traits>

#include "nvshmem/plan/rail_call.h"
#include "nvshmem/steps/receive.h"
#include "p2p/device/reduce.cuh"
#include "p2p/device/work.cuh"

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

// Divides `n_rows` rows among the warps of the block: work(row, slice) for each slice of a row that
// this warp takes.
template <class Work>
__device__ void ForEachSlice(int n_rows, const Work& work) {
  constexpr int kWarps = kThreads / p2p::kWarpSize;
  int n_slices = kWarps;
  while (n_slices > 1 && n_slices * n_rows > kWarps) n_slices /= 2;
  const p2p::Slice slice{p2p::WarpIndex() % n_slices, n_slices};
  for (int row = p2p::WarpIndex() / n_slices; row < n_rows; row += kWarps / n_slices) {
    work(row, slice);
  }
}

// The rows of the own node's sum of a token.
struct OwnSum {
  bool has_come;  // false: a wait has failed
  p2p::Addends addends;
};

// Adds up a tile of this rank's tokens, `residual` [n_rows] or null, `out` [n_rows]. own_sum(row,
// slice) is an OwnSum, the same for all slices. False if one has not come.
template <class T, class GetOwnSum>
__device__ bool AddUpTile(const RailCall& call, int64_t tile, const SentSums& sent,
                          const GetOwnSum& own_sum, const uint8_t* residual, uint8_t* out) {
  const int64_t bytes = call.rows.bytes;
  bool has_come = true;
  ForEachSlice(call.tiles.Rows(tile), [&](int row, p2p::Slice slice) {
    const OwnSum own = own_sum(row, slice);
    has_come &= own.has_come;
    if (!own.has_come) return;
    const int64_t offset = (call.tiles.Begin(tile) + row) * bytes;
    SumNodes<T>(
        {call.node, call.n_nodes, own.addends, residual == nullptr ? nullptr : residual + offset},
        [&](int node) { return sent.Find(node, row); }, out + offset,
        static_cast<int>(bytes / kVectorBytes), slice);
  });
  return has_come;
}

}  // namespace jax_ep::rail
