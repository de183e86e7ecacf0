// Targets and counters as dicts, which both extension modules give to Python.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "core/rank.h"
#include "xla/handler.h"

namespace jax_ep {

// The targets of the extension: name -> handler, or stage -> handler.
inline nanobind::dict TargetDict() {
  const auto capsule = [](XLA_FFI_Handler* handler) {
    return nanobind::capsule(reinterpret_cast<void*>(handler));
  };
  nanobind::dict dict;
  for (const Target* target = Target::first; target != nullptr; target = target->next) {
    if (target->instantiate == nullptr) {
      dict[target->name] = capsule(target->execute);
      continue;
    }
    nanobind::dict stages;
    stages["instantiate"] = capsule(target->instantiate);
    stages["execute"] = capsule(target->execute);
    dict[target->name] = stages;
  }
  return dict;
}

// Counters as jax_ep/stats.py reads them.
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
