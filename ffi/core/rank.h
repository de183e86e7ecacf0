// A rank of an open group: where its device is in the mesh, and what it has counted.
#pragma once

#include <cstdint>
#include <vector>

namespace jax_ep {

// A device's position in the mesh.

struct MeshCoordinate {
  int64_t replica;  // of the EP group: the index along all other axes of the mesh
  int64_t rank;     // along the EP axis
};

// The counters of one rank since its group was opened. jax_ep/stats.py documents each total.

struct RankStats {
  int64_t dispatch_calls = 0;
  int64_t combine_calls = 0;
  int64_t invalid_ids = 0;
  int64_t dropped_rows = 0;
  std::vector<int64_t> tokens_to_rank;   // [R]
  std::vector<int64_t> bytes_to_rank;    // [R]
  std::vector<int64_t> rows_to_group;    // [G] choices of this rank's tokens
  std::vector<int64_t> rows_per_group;   // [G / R] rows that this rank received
  std::vector<int64_t> wait_ns;          // [2, R] (dispatch, combine) x peer
  std::vector<int64_t> longest_wait_ns;  // [2, R]

  RankStats() = default;
  RankStats(int64_t n_ranks, int64_t n_groups)
      : tokens_to_rank(n_ranks),
        bytes_to_rank(n_ranks),
        rows_to_group(n_groups),
        rows_per_group(n_groups / n_ranks),
        wait_ns(2 * n_ranks),
        longest_wait_ns(2 * n_ranks) {}
};

}  // namespace jax_ep
