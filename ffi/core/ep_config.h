// The static parameters of a call: EPConfig of Python plus what ep_init derives from the mesh.
// They travel as typed attributes of the custom call; the names are the same on both sides.
#pragma once

#include <cstdint>
#include <string_view>

namespace jax_ep {

struct EpConfig {
  std::string_view group;       // key of the group, see EPGroup.key
  int64_t n_ranks;              // R
  int64_t n_experts;            // E, a multiple of R
  int64_t top_k;                // K
  int64_t hidden_size;          // H, elements
  int64_t max_tokens_per_rank;  // M
  int64_t max_recv_tokens;      // C, rows of the output of dispatch
  std::string_view token_format;
  int64_t payload_bytes;           // of a row of the output of dispatch
  int64_t n_scales;                // of a token; 0: it travels as it is
  std::string_view scales_layout;  // "none", "row_major", "transposed" or "atoms"
  int64_t row_alignment;           // groups of rows begin at multiples of it
  std::string_view combine_dtype;
  bool fused_shared_expert;
  bool skip_a2a;
  int64_t n_gpus_per_node;
  int64_t n_nodes;
  int64_t n_sms;     // 0: the transport chooses
  double timeout_s;  // seconds

  int64_t n_local_experts() const { return n_experts / n_ranks; }
};

}  // namespace jax_ep
