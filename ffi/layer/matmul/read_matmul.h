// XLA's buffers and attributes -> MatmulCall.
#pragma once

#include "core/status.h"
#include "layer/matmul/matmul_call.h"
#include "xla/attributes.h"
#include "xla/buffers.h"

namespace jax_ep {

// Operands: lhs, rhs, row_offsets [L + 1], and for e4m3 lhs_scales, rhs_scales. Results: the
// product, the workspace.
Status ReadMatmul(const MatmulAttributes& attributes, const BufferList& operands,
                  const BufferList& results, MatmulCall* call);

}  // namespace jax_ep
