// XLA's buffers and attributes -> MatmulCall and Gate or GatedGradient.
#pragma once

#include "core/status.h"
#include "layer/activation/read_silu.h"
#include "layer/matmul/gated.h"
#include "layer/matmul/gated_gradient.h"
#include "layer/matmul/matmul_call.h"
#include "xla/buffers.h"

namespace jax_ep::matmul {

// By the names that Python sets.
struct GatedAttributes {
  bool interleaved;
  bool clamped;
  float alpha;
  float limit;
  bool keeps_hidden;

  silu::Activation activation() const { return {clamped, alpha, limit}; }
};

// Operands, of bfloat16: rows [C, k], weights [L, k, 2 F], row_offsets [L + 1] and, if there is
// one, the bias [L, 2 F]. Results: values [C, F], the matmul's result [C, 2 F], with the bias, or
// room for it, the workspace.
Status ReadGated(const GatedAttributes& attributes, const BufferList& operands,
                 const BufferList& results, MatmulCall* call, Gate* gate);

// Operands: rows [C, k] and weights [L, 2 F, k] of e4m3, row_offsets [L + 1], the scales of rows
// [k / 128, C] and of weights [L, 2 F / 128, k / 128], biases? [L, 2 F] of bfloat16. Results: codes
// [C, F], their scales [F / 128, C], the workspace. F is a multiple of 128.
Status ReadGatedScaled(const silu::GateAttributes& attributes, const BufferList& operands,
                       const BufferList& results, MatmulCall* call, Gate* gate);

// Operands, of bfloat16: the gradient of the second matmul's result [C, k], its weights [L, F, k],
// hidden rows [C, 2 F], row_offsets [L + 1]. Results: the gradient of the hidden rows, room for
// that of the activation's result [C, F], the workspace.
Status ReadGatedGradient(const silu::GateAttributes& attributes, const BufferList& operands,
                         const BufferList& results, MatmulCall* call, GatedGradient* gradient);

}  // namespace jax_ep::matmul

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_ep::matmul::GatedAttributes,
                                      StructMember<bool>("interleaved"),
                                      StructMember<bool>("clamped"), StructMember<float>("alpha"),
                                      StructMember<float>("limit"),
                                      StructMember<bool>("keeps_hidden"));
