// XLA's buffers and attributes -> SiluCall, for the handlers of both platforms.
#pragma once

#include <string_view>
#include <utility>

#include "core/status.h"
#include "layer/activation/silu.h"
#include "xla/buffers.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep::silu {

// By the names that Python sets. Strings point into XLA's call frame.
struct SiluAttributes {
  std::string_view token_format;
  std::string_view scales_layout;
  bool interleaved;
  bool clamped;
  float alpha;
  float limit;

  Activation activation() const { return {clamped, alpha, limit}; }
};

// Of calls that do not quantize, by the names that Python sets.
struct GateAttributes {
  bool interleaved;
  bool clamped;
  float alpha;
  float limit;

  Activation activation() const { return {clamped, alpha, limit}; }
};

// Operands: x [C, 2 F], row_offsets [L + 1], input_scales? [L]. Results: the rows, scales?.
// `attributes` must outlive the call.
Status ReadSilu(const SiluAttributes& attributes, const BufferList& operands,
                const BufferList& results, SiluCall* call);

// Operands: x [C, 2 F], row_offsets [L + 1], the result's gradient [C, F]. Result: that of x. All
// of bfloat16.
Status ReadSiluGradient(const GateAttributes& attributes, const BufferList& operands,
                        const BufferList& results, GradientCall* call);

// Adds what follows the context in every binding.
template <class Binding>
auto WithSiluOperands(Binding binding) {
  return std::move(binding).RemainingArgs().RemainingRets().template Attrs<SiluAttributes>();
}

}  // namespace jax_ep::silu

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_ep::silu::SiluAttributes,
                                      StructMember<std::string_view>("token_format"),
                                      StructMember<std::string_view>("scales_layout"),
                                      StructMember<bool>("interleaved"),
                                      StructMember<bool>("clamped"), StructMember<float>("alpha"),
                                      StructMember<float>("limit"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_ep::silu::GateAttributes,
                                      StructMember<bool>("interleaved"),
                                      StructMember<bool>("clamped"), StructMember<float>("alpha"),
                                      StructMember<float>("limit"));
