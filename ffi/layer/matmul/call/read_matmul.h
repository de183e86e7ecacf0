// XLA's buffers and attributes -> MatmulCall.
#pragma once

#include "core/status.h"
#include "layer/matmul/matmul_call.h"
#include "xla/buffers.h"
#include "xla/enum_attribute.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep::matmul {

// By the names that Python sets.
struct MatmulAttributes {
  MatmulForm form;
  bool zeroes_unused;
};

// Operands: lhs, rhs, row_offsets [L + 1], and for e4m3 lhs_scales, rhs_scales; in the form kRows,
// there may be an accumulator. Results: the product, the workspace. `*accumulator` is null if there
// is none. XLA gives it the memory of the product, unless it makes the call work on slices of
// larger arrays: the caller then copies it there.
Status ReadMatmul(const MatmulAttributes& attributes, const BufferList& operands,
                  const BufferList& results, MatmulCall* call, const void** accumulator);

}  // namespace jax_ep::matmul

JAX_EP_REGISTER_ENUM_ATTRIBUTE(::jax_ep::matmul::MatmulForm, "grouped_matmul: form", 3);
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_ep::matmul::MatmulAttributes,
                                      StructMember<::jax_ep::matmul::MatmulForm>("form"),
                                      StructMember<bool>("zeroes_unused"));
