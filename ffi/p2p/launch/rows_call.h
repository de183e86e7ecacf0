// What the kernels of combine and of its backward take besides their operands.
#pragma once

#include <cstdint>

#include "core/operands.h"
#include "p2p/launch/call_args.h"

namespace jax_ep::p2p {

struct RowsCall {
  CallArgs call;
  int32_t row_vectors;  // size of a row in units of kVectorBytes
  CombineMode mode;
  const int32_t* message_rows;  // [R, M, 1 + N]  of the handle, which begins with message_counts

  JAX_EP_HOST_DEVICE size_t row_bytes() const { return row_vectors * kVectorBytes; }
  // Mask of the lane that has the shared expert's choice; 0 = none.
  JAX_EP_HOST_DEVICE uint32_t shared_expert_lane() const {
    return mode.adds_shared_expert ? 1u << (call.n_choices - 1) : 0;
  }
};

}  // namespace jax_ep::p2p
