// XLA's buffers and attributes -> SiluCall, for the handlers of both platforms.
#pragma once

#include <utility>

#include "core/status.h"
#include "layer/silu/silu_call.h"
#include "xla/attributes.h"
#include "xla/buffers.h"

namespace jax_ep {

// Operands: x [C, 2 F], row_offsets [L + 1], input_scales? [L]. Results: the rows, scales?.
// `attributes` must outlive the call.
Status ReadSilu(const SiluAttributes& attributes, const BufferList& operands,
                const BufferList& results, SiluCall* call);

// Adds what follows the context in every binding.
template <class Binding>
auto WithSiluOperands(Binding binding) {
  return std::move(binding).RemainingArgs().RemainingRets().template Attrs<SiluAttributes>();
}

}  // namespace jax_ep
