// The workspace: one rank's memory that its peers write to, the same map on every rank. Planned
// once, from the shape of the group; sizes and offsets come from the same line.
//
// What calls exchange exists twice, and calls take turns. That is why no call waits for its peers
// before it writes: docs/protocol.md has the proof.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/host_device.h"
#include "core/message.h"
#include "core/stats_words.h"

namespace jax_ep {

struct WorkspaceShape {
  int64_t n_ranks;              // R
  int64_t n_local_experts;      // L
  int64_t top_k;                // K
  int64_t max_tokens_per_rank;  // M
  int64_t token_bytes;          // a token as it travels in dispatch
  int64_t row_bytes;            // a row as it travels in combine
};

// Bytes [offset, offset + n_copies * bytes) of the workspace.
struct Region {
  size_t offset;
  size_t bytes;  // of one copy
  size_t n_copies;

  JAX_EP_HOST_DEVICE constexpr size_t end() const { return offset + n_copies * bytes; }
  JAX_EP_HOST_DEVICE constexpr size_t Copy(uint32_t copy) const { return offset + copy * bytes; }
};

// Where a kind of call stands on one rank.
struct CallState {
  uint32_t n_blocks_begun;  // of the call that is beginning
  uint32_t epoch;           // of the last call that began
};

struct Workspace {
  static constexpr size_t kAlignment = 256;
  static constexpr size_t kCopies = 2;

  // This rank's own.
  Region dispatch_state;  // CallState
  Region combine_state;   // CallState
  Region failed;  // uint32        not 0: a call has failed, and no call does anything any more
  Region peers;   // uint8_t*[R]    workspaces of all ranks, as this rank sees them
  Region stats;   // uint64         see StatsWords

  // Written by peers; [R] is by source rank.
  Region counts;    // word[L + 1, R]     rows for each local expert; then messages
  Region arrived;   // word[R, M]         index of the token
  Region messages;  // message[R, M]      valid once `arrived` says so
  Region begun;     // word[R]            the peer has begun this combine
  Region returned;  // word[M, K]         which choices of the token have rows; at the rank's first
                    // choice
  Region rows;      // row[M, K]          valid once `returned` says so

  size_t message_bytes;
  size_t bytes;  // whole workspace

  static constexpr Workspace Plan(const WorkspaceShape& s) {
    const size_t n_ranks = s.n_ranks, max_tokens = s.max_tokens_per_rank;
    const size_t n_choices = max_tokens * s.top_k, word = sizeof(uint64_t);
    const StatsWords stats{n_ranks, static_cast<size_t>(s.n_local_experts)};
    Workspace w{};
    w.message_bytes = MessageBytes(s.token_bytes, s.top_k);
    w.dispatch_state = After(0, sizeof(CallState));
    w.combine_state = After(w.dispatch_state.end(), sizeof(CallState));
    w.failed = After(w.combine_state.end(), sizeof(uint32_t));
    w.peers = After(w.failed.end(), n_ranks * sizeof(void*));
    w.stats = After(w.peers.end(), stats.n_words() * word);
    w.counts = After(w.stats.end(), n_ranks * (s.n_local_experts + 1) * word, kCopies);
    w.arrived = After(w.counts.end(), n_ranks * max_tokens * word, kCopies);
    w.begun = After(w.arrived.end(), n_ranks * word, kCopies);
    w.returned = After(w.begun.end(), n_choices * word, kCopies);
    w.messages = After(w.returned.end(), n_ranks * max_tokens * w.message_bytes, kCopies);
    w.rows = After(w.messages.end(), n_choices * s.row_bytes, kCopies);
    w.bytes = w.rows.end();
    return w;
  }

 private:
  static constexpr Region After(size_t end, size_t bytes, size_t n_copies = 1) {
    return {AlignUp(end, kAlignment), AlignUp(bytes, kAlignment), n_copies};
  }
};

namespace workspace_test {
constexpr Workspace kExample = Workspace::Plan({4, 64, 8, 4096, 14336, 14336});
static_assert(kExample.message_bytes == 14336 + 128, "the token and its 8 choices");
static_assert(kExample.messages.bytes == size_t{4} * 4096 * (14336 + 128),
              "a slab per source rank");
static_assert(kExample.counts.bytes >= 4 * 65 * sizeof(uint64_t), "64 experts and the messages");
}  // namespace workspace_test

}  // namespace jax_ep
