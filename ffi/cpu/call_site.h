// FFI state of one custom call in one executable: its static parameters, decoded once. Its address
// also tells the call from every other one in the process: XLA inlines functions and makes several
// calls of one, with equal attributes.
#pragma once

#include <string>

#include "core/ep_config.h"
#include "cpu/combine.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

namespace ffi = xla::ffi;

struct CallSite {
  static ffi::TypeId id;

  EpConfig config;
  Weighting weighting;  // combine and combine_grad; dispatch: kRow where weights travel along
  bool reduce;          // combine
  bool has_residual;    // combine

  // What the string_views of `config` point to.
  std::string group, token_format, scales_layout, combine_dtype;
};

}  // namespace jax_ep

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jax_ep::EpConfig, StructMember<std::string_view>("group"), StructMember<int64_t>("n_ranks"),
    StructMember<int64_t>("n_experts"), StructMember<int64_t>("top_k"),
    StructMember<int64_t>("hidden_size"), StructMember<int64_t>("max_tokens_per_rank"),
    StructMember<int64_t>("max_recv_tokens"), StructMember<std::string_view>("token_format"),
    StructMember<int64_t>("payload_bytes"), StructMember<int64_t>("n_scales"),
    StructMember<std::string_view>("scales_layout"), StructMember<int64_t>("row_alignment"),
    StructMember<std::string_view>("combine_dtype"), StructMember<bool>("fused_shared_expert"),
    StructMember<bool>("skip_a2a"), StructMember<int64_t>("n_gpus_per_node"),
    StructMember<int64_t>("n_nodes"), StructMember<int64_t>("n_sms"),
    StructMember<double>("timeout_s"));
XLA_FFI_REGISTER_ENUM_ATTR_DECODING(::jax_ep::Weighting);
