// XLA's buffers and attributes -> MatmulCall and Gate.
#pragma once

#include "core/status.h"
#include "layer/matmul/gated.h"
#include "layer/matmul/matmul_call.h"
#include "xla/buffers.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep::matmul {

// By the names that Python sets.
struct GateAttributes {
  bool interleaved;
  bool clamped;
  float alpha;
  float limit;
};

// Operands, of bfloat16: rows [C, k], weights [L, k, 2 F], row_offsets [L + 1]. Results: values
// [C, F], room for the matmul's result [C, 2 F], the workspace.
Status ReadGated(const GateAttributes& attributes, const BufferList& operands,
                 const BufferList& results, MatmulCall* call, Gate* gate);

}  // namespace jax_ep::matmul

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_ep::matmul::GateAttributes,
                                      StructMember<bool>("interleaved"),
                                      StructMember<bool>("clamped"), StructMember<float>("alpha"),
                                      StructMember<float>("limit"));
