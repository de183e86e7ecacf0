// Kernel arguments that calls share: the calling rank, its workspace, the group's sizes, the launch
// plan, and tokens that another kernel brings. Passed to kernels by value.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/operands.h"
#include "core/workspace.h"

namespace jax_ep {

// Division by a number that is known on the host, as one multiplication on the device.
//
// Exact for dividends n < 2^32 / d: with the multiplier m = ceil(2^32 / d) = (2^32 + e) / d, e < d,
// the error n * e / (d * 2^32) stays below 1 / d.
class FastDivisor {
 public:
  FastDivisor() = default;
  explicit FastDivisor(uint32_t divisor)
      : divisor_(divisor), multiplier_(((uint64_t{1} << 32) + divisor - 1) / divisor) {}

  JAX_EP_HOST_DEVICE uint32_t divisor() const { return divisor_; }
  JAX_EP_HOST_DEVICE uint32_t Divide(uint32_t dividend) const {
    return static_cast<uint32_t>((dividend * multiplier_) >> 32);
  }

  // Whether division by `divisor` is exact for all dividends below `dividend_limit`.
  static bool IsExactBelow(uint64_t dividend_limit, uint32_t divisor) {
    return dividend_limit * divisor <= uint64_t{1} << 32;
  }

 private:
  uint32_t divisor_ = 1;
  uint64_t multiplier_ = uint64_t{1} << 32;
};

}  // namespace jax_ep

namespace jax_ep::p2p {

constexpr int kWarpSize = 32;
constexpr int kWorkerWarps = 16;  // warps of a block that move tokens and rows
constexpr int kWorkerThreads = kWorkerWarps * kWarpSize;
// Threads of kernels with a service warp beside the workers: it starts the call, and waits for
// counts.
constexpr int kServedThreads = kWorkerThreads + kWarpSize;

constexpr int kMaxChoices = kWarpSize;  // one lane per choice

// The vectors that a warp moves at once in LL calls: they make one packet per lane.
constexpr int kPieceVectors = kWarpSize * kPacketDataBytes / kVectorBytes;
constexpr int kPieceBytes = kPieceVectors * kVectorBytes;
constexpr size_t kPieceBuffersBytes = kWorkerWarps * kPieceBytes;

// Into how many slices blocks divide a row of such calls at most: a slice has a piece per worker
// warp.
JAX_EP_HOST_DEVICE constexpr int PacketSlices(int n_vectors) {
  constexpr int kSliceVectors = kWorkerWarps * kPieceVectors;
  return (n_vectors + kSliceVectors - 1) / kSliceVectors;
}

// How a call spreads over the GPU. Ranks may use different plans, but for uses_ll.
struct LaunchPlan {
  int32_t n_blocks;           // all resident at once, because blocks wait for peers
  int32_t n_elsewhere;        // the last of them, which are another kernel's
  int32_t n_send_blocks;      // the first blocks send; if all do, all receive afterwards
  int32_t warps_per_send;     // warps that share one message; a power of 2, at most kWorkerWarps
  int32_t warps_per_receive;  // the same on the receiving side
  int32_t n_stages;       // dispatch: stages per block, see device/stage.cuh; 0 = no bulk copies
  bool receives_in_bulk;  // dispatch: blocks that only receive use stages, too
  int32_t ring_slots;     // combine: slots of each warp's ring, see combine/ring.cuh; 0 = no ring
  int32_t n_ranges;       // combine in rings: ranges of messages, served round robin; 0 = one
  bool in_clusters;       // clusters of 2 blocks, which leave pairs of SMs to other clusters
  bool uses_ll;  // everything travels in LL packets; the same on all ranks. Of the rest of the
                 // plan, only n_blocks and in_clusters count then
};

// Why a call failed. Waits that timed out, but for kWrongMesh and those of a changed handle.
enum class Phase : uint32_t {
  kNone = 0,
  kCounts,           // dispatch: the peer's counts
  kMessage,          // dispatch: a message of the peer
  kDispatchStarted,  // LL dispatch: the peer's start of the call
  kChoices,          // LL dispatch: the choices of the peer's tokens
  kStarted,          // combine: the peer's start of the call
  kReturned,         // combine: rows that the peer returns
  kWeights,          // combine: the weights of the peer's tokens
  kGradStarted,      // the backward of combine: the peer's start of the call
  kCotangent,        // the backward of combine: a token's cotangent
  kDots,             // the backward of combine: gradients of weights
  kWrongMesh,        // the program runs on another mesh than the group; `peer` is the program's
                     // coordinate
  kPart,             // a part of what origin `peer` sends to this group from outside
  kPartTaken,        // that origin `peer` has taken earlier parts
  kChangedHandle,    // combine: the handle is not what dispatch left of the messages of `peer`
  kGradHandle,       // the backward of combine: the same
  kGradOffsets,      // the backward of combine: neither are row_offsets; `peer` is this rank
};

// A failure as one word in mapped host memory; 0 = no failure.
struct Failure {
  Phase phase;
  uint32_t peer;   // that did not answer
  uint32_t epoch;  // of the call; of kPart and kPartTaken, the number of the part

  JAX_EP_HOST_DEVICE uint64_t ToWord() const {
    return uint64_t{epoch} << 32 | uint64_t{peer} << 8 | static_cast<uint32_t>(phase);
  }
  static Failure FromWord(uint64_t word) {
    return {static_cast<Phase>(word & 0xff), static_cast<uint32_t>(word >> 8) & 0xffffff,
            static_cast<uint32_t>(word >> 32)};
  }
};

// Where a rank's kernels report that a call has failed (device/call_state.cuh), and the time limit
// of their waits: for kernels without CallArgs.
struct FailureWords {
  uint32_t* failed;   // in device memory; nonzero: calls do nothing from now on
  uint64_t* failure;  // Failure::ToWord() in mapped host memory
  int64_t timeout_ns;
};

// core/routing.h defines R, G and N.
struct CallArgs {
  Workspace map;       // of every rank's workspace
  uint8_t* workspace;  // of this rank
  uint64_t* failure;   // Failure::ToWord() in mapped host memory
  int64_t timeout_ns;

  int32_t rank;
  int32_t n_ranks;                    // R
  int32_t n_ranks_per_node;           // ranks are numbered node by node
  int32_t n_groups;                   // G
  FastDivisor local_groups;           // divides by n_local_groups
  int32_t n_choices;                  // N
  int32_t max_tokens;                 // M
  int32_t n_tokens;                   // T
  int32_t row_alignment;              // of each set of groups of rows; a power of 2
  int32_t n_source_nodes;             // groups of a set; see core/routing.h
  int32_t coordinate;                 // replica * R + rank, as the group was opened
  const int32_t* program_coordinate;  // the same in the program's mesh; null = not checked
  LaunchPlan plan;

  uint64_t* trace;  // null, or uint64[kTraceSteps, n_blocks]: ns at the end of each step

  JAX_EP_HOST_DEVICE int32_t n_local_groups() const {
    return static_cast<int32_t>(local_groups.divisor());
  }
  JAX_EP_HOST_DEVICE int32_t RankOf(int32_t group) const {
    return static_cast<int32_t>(local_groups.Divide(static_cast<uint32_t>(group)));
  }
  JAX_EP_HOST_DEVICE bool IsGroup(int32_t id) const {
    return static_cast<uint32_t>(id) < static_cast<uint32_t>(n_groups);
  }
};

// Whether combine sums node by node.
constexpr bool HasNodes(const CallArgs& call) { return call.n_ranks_per_node < call.n_ranks; }

// Steps of a call whose end a block records in CallArgs::trace.
enum TraceStep : int { kEntered, kPrepared, kLaidOut, kSent, kReceived, kTraceSteps };

// The handle that dispatch leaves for combine on each destination rank is one buffer of
// int32[R + R M (1 + N)]: `message_counts` [R], the messages from each source rank, followed by
// `message_rows` [R, M, 1 + N] by source rank and slot: the message's token, then for each of its
// choices the row, or one of these:
constexpr int32_t kNotHere = -1;  // the choice names no group of this rank
constexpr int32_t kDropped = -2;  // it does, but its row lies beyond max_recv_tokens

// Arguments of the kernels of combine and of its backward besides their operands.
struct RowsCall {
  CallArgs call;
  int32_t row_vectors;  // size of a row in units of kVectorBytes
  CombineMode mode;
  const int32_t* message_rows;  // [R, M, 1 + N]  of the handle, which begins with message_counts

  JAX_EP_HOST_DEVICE size_t row_bytes() const { return row_vectors * kVectorBytes; }
  // Mask of the lane that has the shared expert's choice; 0 = none.
  JAX_EP_HOST_DEVICE uint32_t shared_expert_lane() const {
    return mode.adds_shared_expert ? 1u << (call.n_choices - 1) : 0;
  }
};

// Tokens, or their cotangents, that another kernel brings while a call runs.
//
// They come in parts, from several origins, as many from each; this rank is one of them. All zero:
// there are none. docs/dev/scale.md says who brings them.
struct ArrivingTokens {
  const uint32_t* words;  // [origin, part]: nonzero once the part's tokens are there; null: all are
  const uint8_t* own;     // [n_tokens], rows of this rank's: not where the others arrive
  int32_t own_origin;     // this rank
  int32_t n_tokens;       // of an origin
  int32_t part_tokens;    // of a part
  int32_t n_parts;        // of an origin

  JAX_EP_HOST_DEVICE int32_t first_own() const { return own_origin * n_tokens; }
};

// The order in which a call takes items of several origins while another kernel brings them.
//
// n items in the order of their origins, about as many of each. First those of `own`, which need
// not arrive; then those of the others in turn, beginning with the next origin, as they arrive.
// `n_origins`: at least 2.
struct OwnFirst {
  int32_t n_origins;
  int32_t own;

  // The i-th item; n: there is none. All have come up once i has reached n + n_origins, or n if
  // each origin has as many.
  JAX_EP_HOST_DEVICE constexpr int32_t At(int32_t i, int32_t n) const {
    const int32_t first = Begin(own, n), n_own = Begin(own + 1, n) - first;
    if (i < n_own) return first + i;
    const int32_t n_parts = n_origins - 1, part_size = (n - n_own + n_parts - 1) / n_parts;
    const int32_t part = (i - n_own) % n_parts, in_part = (i - n_own) / n_parts;
    const int32_t after = n_own + part * part_size + in_part;  // in the order from `first` on
    if (in_part >= part_size || after >= n) return n;
    return after < n - first ? first + after : after - (n - first);
  }

  // The first of an origin's items.
  JAX_EP_HOST_DEVICE constexpr int32_t Begin(int64_t origin, int32_t n) const {
    return static_cast<int32_t>(n * origin / n_origins);
  }
};

}  // namespace jax_ep::p2p
