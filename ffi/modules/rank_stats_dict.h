// RankStats -> dict, as jax_ep/stats.py reads it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "core/rank_stats.h"

namespace jax_ep {

inline nanobind::dict ToDict(const RankStats& stats) {
  nanobind::dict dict;
  dict["dispatch_calls"] = stats.dispatch_calls;
  dict["combine_calls"] = stats.combine_calls;
  dict["invalid_ids"] = stats.invalid_ids;
  dict["dropped_rows"] = stats.dropped_rows;
  dict["tokens_to_rank"] = stats.tokens_to_rank;
  dict["bytes_to_rank"] = stats.bytes_to_rank;
  dict["rows_to_group"] = stats.rows_to_group;
  dict["rows_per_group"] = stats.rows_per_group;
  dict["wait_ns"] = stats.wait_ns;
  dict["longest_wait_ns"] = stats.longest_wait_ns;
  return dict;
}

}  // namespace jax_ep
