// The static parameters of a call: EPConfig of Python plus what ep_init derives from the mesh.
// They travel as typed attributes of the custom call; the names are the same on both sides.
//
// R, E and K are those of what is routed (jax_ep/choices.py): a fused shared expert is the first of
// each rank's L and the last of each token's K; with skip_a2a there is one rank.
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
  // The last choice is the shared expert's. combine adds its row unweighted, after the cast; false
  // where it is to sum it up like the others, in the backward of dispatch.
  bool fused_shared_expert;
  bool skip_a2a;
  int64_t n_gpus_per_node;
  int64_t n_nodes;
  int64_t n_sms;     // 0: the transport chooses
  double timeout_s;  // seconds

  int64_t n_local_experts() const { return n_experts / n_ranks; }
  int64_t n_weighted_choices() const { return top_k - (fused_shared_expert ? 1 : 0); }
};

}  // namespace jax_ep
