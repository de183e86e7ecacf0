// XLA FFI -> SiluCall, for the handlers of all platforms.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/silu_call.h"
#include "core/status.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

namespace ffi = xla::ffi;

struct SiluOperands {
  ffi::AnyBuffer x;
  ffi::BufferR1<ffi::U32> row_offsets;
  ffi::RemainingArgs optional_args;
  ffi::AnyBuffer out;
  ffi::RemainingRets optional_rets;
};

struct SiluAttributes {
  std::string_view token_format;
  std::string_view scales_layout;
  int64_t n_scales;
  bool is_interleaved;
  bool is_clamped;
  float alpha;
  float limit;
};

inline Status InvalidSilu(const std::string& what) {
  return InvalidArgument("fused_silu: " + what);
}

inline bool ToSiluType(ffi::DataType type, RowType& row_type) {
  if (type == ffi::BF16) row_type = RowType::kBFloat16;
  if (type == ffi::F16) row_type = RowType::kFloat16;
  if (type == ffi::F32) row_type = RowType::kFloat32;
  return type == ffi::BF16 || type == ffi::F16 || type == ffi::F32;
}

// Elements that a result of this layout has.
inline int64_t ScalesSize(const SiluCall& call) {
  if (call.scales_layout != ScalesLayout::kAtoms) return call.n_rows * call.n_scales;
  return MaxBlocks(call.n_rows, call.n_groups) * AtomsPerRow(call.n_scales) * kAtomBytes;
}

inline Status ReadSiluBuffers(const SiluOperands& operands, SiluCall& call) {
  const auto x_shape = operands.x.dimensions(), out_shape = operands.out.dimensions();
  const bool is_plain = call.scales_layout == ScalesLayout::kNone;
  if (x_shape.size() != 2 || x_shape[1] % 2 != 0 || operands.row_offsets.element_count() < 1 ||
      !ToSiluType(operands.x.element_type(), call.x_type)) {
    return InvalidSilu("x must be [C, 2 F] numbers, and row_offsets have L + 1 elements");
  }
  call.n_rows = x_shape[0];
  call.row_size = x_shape[1] / 2;
  call.n_groups = static_cast<int64_t>(operands.row_offsets.element_count()) - 1;
  const bool is_row = out_shape.size() == 2 && out_shape[0] == call.n_rows;
  const bool is_packed = !is_plain && is_row && out_shape[1] * 2 == call.row_size;
  if (!is_row || (out_shape[1] != call.row_size && !is_packed) ||
      (is_plain && !ToSiluType(operands.out.element_type(), call.out_type))) {
    return InvalidSilu("the result must be [C, F] or, packed, [C, F / 2]");
  }
  call.x = operands.x.untyped_data();
  call.row_offsets = operands.row_offsets.typed_data();
  call.out = const_cast<void*>(static_cast<const void*>(operands.out.untyped_data()));
  return {};
}

// `attributes` must outlive the call.
inline Status ReadSiluCall(const SiluOperands& operands, const SiluAttributes& attributes,
                           SiluCall& call) {
  call.token_format = attributes.token_format;
  call.scales_layout = ToScalesLayout(attributes.scales_layout);
  call.n_scales = attributes.n_scales;
  call.is_interleaved = attributes.is_interleaved;
  call.activation = {attributes.is_clamped, attributes.alpha, attributes.limit};
  const Status status = ReadSiluBuffers(operands, call);
  if (!status.ok()) return status;
  if (operands.optional_args.size() > 0) {
    const auto input_scales = operands.optional_args.get<ffi::BufferR1<ffi::F32>>(0);
    if (!input_scales || static_cast<int64_t>(input_scales->element_count()) != call.n_groups) {
      return InvalidSilu("input_scales must be float32[L]");
    }
    call.input_scales = input_scales->typed_data();
  }
  if (call.scales_layout == ScalesLayout::kNone) return {};
  auto scales = operands.optional_rets.get<ffi::AnyBuffer>(0);
  if (!scales || static_cast<int64_t>((*scales)->element_count()) != ScalesSize(call)) {
    return InvalidSilu("scales must have the size of their layout");
  }
  call.scales = (*scales)->untyped_data();
  return {};
}

// What all bindings have after the context: x [C, 2 F], row_offsets [L + 1], input_scales? [L];
// the rows, scales?.
template <class Binding>
auto BindSilu(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::BufferR1<ffi::U32>>()
      .RemainingArgs()
      .template Ret<ffi::AnyBuffer>()
      .RemainingRets()
      .template Attrs<SiluAttributes>();
}

}  // namespace jax_ep

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_ep::SiluAttributes,
                                      StructMember<std::string_view>("token_format"),
                                      StructMember<std::string_view>("scales_layout"),
                                      StructMember<int64_t>("n_scales"),
                                      StructMember<bool>("is_interleaved"),
                                      StructMember<bool>("is_clamped"),
                                      StructMember<float>("alpha"), StructMember<float>("limit"));
