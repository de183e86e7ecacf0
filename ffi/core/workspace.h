// Byte map of a workspace: the memory of one rank that its peers write to. All ranks of a group
// have the same map. It is planned once, when the group opens; each region's offset and size come
// from the same line.
//
// Regions that calls exchange data through are double-buffered: calls alternate between two
// buffers, so a call writes to its peers without waiting for them (proof: docs/dev/protocol.md).
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/host_device.h"
#include "core/message.h"
#include "core/operands.h"

namespace jax_ep {

// Map of a rank's counters in its p2p workspace: 64-bit words that only the rank's own kernels add
// to, so that replays of a captured graph are counted too.
struct StatsWords {
  // Single words.
  static constexpr size_t kDispatchCalls = 0;
  static constexpr size_t kCombineCalls = 1;
  static constexpr size_t kInvalidIds = 2;
  static constexpr size_t kDroppedRows = 3;

  // First index of the wait arrays. Waits are in SM clock cycles: reading the device's timer often
  // takes as long as the wait.
  static constexpr size_t kDispatch = 0;
  static constexpr size_t kCombine = 1;

  size_t n_ranks;         // R
  size_t n_local_groups;  // G/R

  // First word of each array.
  JAX_EP_HOST_DEVICE constexpr size_t tokens_to_rank() const { return 4; }  // [R]
  JAX_EP_HOST_DEVICE constexpr size_t bytes_to_rank() const {               // [R]
    return tokens_to_rank() + n_ranks;
  }
  JAX_EP_HOST_DEVICE constexpr size_t wait() const { return bytes_to_rank() + n_ranks; }  // [2, R]
  JAX_EP_HOST_DEVICE constexpr size_t longest_wait() const {
    return wait() + 2 * n_ranks;
  }  // [2, R]
  JAX_EP_HOST_DEVICE constexpr size_t rows_to_group() const {  // [G]
    return longest_wait() + 2 * n_ranks;
  }
  JAX_EP_HOST_DEVICE constexpr size_t rows_per_group() const {  // [G/R]
    return rows_to_group() + n_ranks * n_local_groups;
  }

  // Pending words: what the last dispatch received. The next dispatch adds them to the totals while
  // it would be idle; until then, readers of the totals add them themselves.
  JAX_EP_HOST_DEVICE constexpr size_t pending() const { return rows_per_group() + n_local_groups; }
  // Offsets from pending(): calls, dropped rows, waits [R], rows per group [G/R].
  static constexpr size_t kPendingCalls = 0;
  static constexpr size_t kPendingDropped = 1;
  static constexpr size_t kPendingWaits = 2;
  JAX_EP_HOST_DEVICE constexpr size_t pending_rows() const { return kPendingWaits + n_ranks; }
  JAX_EP_HOST_DEVICE constexpr size_t n_pending() const { return pending_rows() + n_local_groups; }
  // The total that pending word i is added to. A wait is also compared with the longest wait.
  JAX_EP_HOST_DEVICE constexpr size_t TotalOf(size_t i) const {
    if (i == kPendingCalls) return kDispatchCalls;
    if (i == kPendingDropped) return kDroppedRows;
    return i < pending_rows() ? wait() + kDispatch * n_ranks + i - kPendingWaits
                              : rows_per_group() + i - pending_rows();
  }
  JAX_EP_HOST_DEVICE constexpr bool IsWait(size_t i) const {
    return i >= kPendingWaits && i < pending_rows();
  }

  JAX_EP_HOST_DEVICE constexpr size_t n_words() const { return pending() + n_pending(); }
};

// One or more buffers of the workspace, one after the other. Every kernel has all regions among its
// arguments. Their size counts: a third word here takes 0.2 us of a dispatch of few tokens.
struct Region {
  size_t offset;
  size_t bytes;  // of one buffer

  // Offset of the buffer that calls of this parity use.
  JAX_EP_HOST_DEVICE constexpr size_t Buffer(uint32_t parity) const {
    return offset + parity * bytes;
  }
};

// Takes regions from a rank's memory, from its beginning on.
class Regions {
 public:
  static constexpr size_t kAlignment = 256;

  constexpr Region Take(size_t bytes, size_t n_buffers = 1) {
    const Region region{AlignUp(end_, kAlignment), AlignUp(bytes, kAlignment)};
    end_ = region.offset + n_buffers * region.bytes;
    return region;
  }
  constexpr size_t end() const { return end_; }

 private:
  size_t end_ = 0;
};

// Calls with few tokens go in LL packets: all that travels, payload included, carries the epoch, so
// that nothing is waited for twice. That takes a third more bytes, and every block looks at all
// choices of all ranks.
constexpr size_t kMaxLLTokens = 64;         // per rank
constexpr size_t kMaxLLChoices = 2048;      // of all ranks
constexpr size_t kMaxLLCounts = 16 * 1024;  // of (group, 32 choices of a rank)

// Tokens per rank up to which calls may go in LL packets.
constexpr size_t MaxLLTokens(const GroupSizes& s) {
  const size_t n_choices = s.n_choices, n_ranks = s.n_ranks, n_groups = s.n_groups;
  const auto min = [](size_t a, size_t b) { return a < b ? a : b; };
  const size_t by_counts = kMaxLLCounts / n_groups * 32 / n_choices;
  return min(min(s.max_tokens_per_rank, kMaxLLTokens),
             min(kMaxLLChoices / (n_ranks * n_choices), by_counts));
}

// Progress of one kind of call (dispatch or combine) on one rank.
struct CallState {
  uint32_t n_blocks_started;  // of the call that is starting
  uint32_t epoch;             // of the last call that all blocks have started
};

struct Workspace {
  static constexpr size_t kBuffers = 2;

  // Private to this rank.
  Region dispatch_state;  // CallState
  Region combine_state;   // CallState
  Region failed;          // uint32       nonzero: a call failed, and later calls do nothing
  Region peers;           // uint8_t*[R]  every rank's workspace, as mapped by this rank
  Region stats;           // uint64       see StatsWords

  // Written by peers. [R] is indexed by source rank.
  Region counts;    // word[G/R + 1, R]  rows for each local group; last, messages to this rank
  Region arrived;   // word[R, M]        a message has arrived; value: the token's index
  Region messages;  // message[R, M]     valid once `arrived` is
  Region started;   // word[R]           the peer has started this combine
  Region returned;  // word[M, N]        rows are back; value: mask of the choices that have one.
                    //                   At the token's first choice on the rank that returns them
  Region rows;      // row[M, N]         valid once `returned` is
  Region weights;   // word[R, M, N]     combine: bits of the weight of a choice, where its row is
  Region scalars;   // word[M, N]        combine: bits of a row's scalar, where its choice is
  Region dots;      // word[M, N]        the same in the backward of combine

  // Regions of LL calls; F = max_ll_tokens.
  Region choice_packets;  // LLPacket[R, F, N]                 group id and bits of the weight
  Region token_packets;   // LLPacket[R, F, packets_of_token]  scales and payload
  Region row_packets;     // LLPacket[F, N, packets_of_row]

  size_t message_bytes;
  size_t max_ll_tokens;
  size_t packets_of_token, packets_of_row;
  size_t bytes;  // of the whole workspace

  // `token_bytes`: scales and payload of a token on the wire, in dispatch; `row_bytes`: a row on
  // the wire, in combine.
  static constexpr Workspace Plan(const GroupSizes& s, int64_t token_bytes, int64_t row_bytes) {
    const size_t n_ranks = s.n_ranks, max_tokens = s.max_tokens_per_rank;
    const size_t max_choices = max_tokens * s.n_choices, word = sizeof(uint64_t);
    const StatsWords stats{n_ranks, static_cast<size_t>(s.n_local_groups())};
    Workspace w{};
    w.message_bytes = MessageBytes(token_bytes, s.n_choices);
    w.packets_of_token = PacketsOf(token_bytes);
    w.packets_of_row = PacketsOf(row_bytes);
    w.max_ll_tokens = MaxLLTokens(s);
    Regions regions;
    w.dispatch_state = regions.Take(sizeof(CallState));
    w.combine_state = regions.Take(sizeof(CallState));
    w.failed = regions.Take(sizeof(uint32_t));
    w.peers = regions.Take(n_ranks * sizeof(void*));
    w.stats = regions.Take(stats.n_words() * word);
    w.counts = regions.Take(n_ranks * (s.n_local_groups() + 1) * word, kBuffers);
    w.arrived = regions.Take(n_ranks * max_tokens * word, kBuffers);
    w.started = regions.Take(n_ranks * word, kBuffers);
    w.returned = regions.Take(max_choices * word, kBuffers);
    w.weights = regions.Take(n_ranks * max_choices * word, kBuffers);
    w.scalars = regions.Take(max_choices * word, kBuffers);
    w.dots = regions.Take(max_choices * word, kBuffers);
    const size_t n_tokens = n_ranks * w.max_ll_tokens, packet = sizeof(LLPacket);
    const size_t n_choices = w.max_ll_tokens * s.n_choices;
    w.choice_packets = regions.Take(n_ranks * n_choices * packet, kBuffers);
    w.token_packets = regions.Take(n_tokens * w.packets_of_token * packet, kBuffers);
    w.row_packets = regions.Take(n_choices * w.packets_of_row * packet, kBuffers);
    w.messages = regions.Take(n_ranks * max_tokens * w.message_bytes, kBuffers);
    w.rows = regions.Take(max_choices * row_bytes, kBuffers);
    w.bytes = regions.end();
    return w;
  }
};

namespace workspace_test {
constexpr Workspace kExample = Workspace::Plan({4, 256, 8, 4096}, 14336, 14336);
static_assert(kExample.message_bytes == 14336 + 128, "the token and its 8 choices");
static_assert(kExample.messages.bytes == size_t{4} * 4096 * (14336 + 128),
              "a slab per source rank");
static_assert(kExample.counts.bytes >= 4 * 65 * sizeof(uint64_t), "64 groups and the messages");
}  // namespace workspace_test

}  // namespace jax_ep
