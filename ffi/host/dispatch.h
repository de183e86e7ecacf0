// dispatch on the host: the tokens of every rank go to rows of the ranks that their choices name.
#pragma once

#include <cstdint>
#include <vector>

#include "core/operands.h"
#include "host/encode.h"
#include "host/parallel.h"
#include "host/rendezvous.h"

namespace jax_ep::host {

struct DispatchArgs : RankArgs, DispatchOperands {
  int64_t NumTokens() const override { return n_tokens; }

  // Set by PrepareEncoding.
  Encoder encoder = nullptr;  // null: tokens travel as they are given
  InputScale global_scale{};  // of formats that take an input_scale; 1 in others
  Scales scales_out;          // where the scales of the rows go

  std::vector<int32_t> counts;     // [G] choices of each group of rows; by CountOwnChoices
  std::vector<int64_t> first_row;  // [G / R, R] see core/routing.h; by the last rank
  std::vector<int64_t> n_rows;     // [G / R] see core/routing.h; by the last rank
  // First row of each set of groups that is padded as one, then the rows in use; by the last rank.
  std::vector<uint32_t> padded_offsets;
};

// Sets up the encoder and the placing of scales, from the operands.
void PrepareEncoding(DispatchArgs& args);

// The part of dispatch that a rank computes before the others have arrived.
void CountOwnChoices(DispatchArgs& args);

// The remaining part, once all ranks have arrived; `arrivals` by rank.
void DispatchAll(const Pool& pool, const std::vector<Arrival>& arrivals);

}  // namespace jax_ep::host
