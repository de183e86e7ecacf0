// The kernel of an LL dispatch, for few tokens; docs/dev/protocol.md says how it differs from the
// other one. The workers of all blocks but the last send and then receive; the last block records
// the call, and does all if it is alone.

#include <algorithm>

#include "core/routing.h"
#include "p2p/device/ll_packets.cuh"
#include "p2p/device/peer.cuh"
#include "p2p/device/start_barrier.cuh"
#include "p2p/device/stats.cuh"
#include "p2p/device/trace.cuh"
#include "p2p/dispatch/dispatch.h"
#include "p2p/dispatch/encode.cuh"
#include "p2p/dispatch_ll/dispatch_ll_receive.cuh"
#include "p2p/launch/launch.h"

namespace jax_ep::p2p {

// The sending half of an LL dispatch: puts the choices of a token to all ranks, and the token
// to the ranks that hold one of its choices.

// This lane's choice of a token that is sent.
struct SentChoice {
  int32_t id;    // or kNoGroup
  int32_t rank;  // of the group, or -1
  float weight;
};

__device__ __forceinline__ SentChoice ReadSentChoice(const DispatchArgs& args, int token) {
  const CallArgs& call = args.call;
  SentChoice choice{kNoGroup, -1, 0.0f};
  if (token >= call.n_tokens || LaneIndex() >= call.n_choices) return choice;
  const int i = token * call.n_choices + LaneIndex();
  const int32_t id = __ldg(args.group_ids + i);
  if (args.topk_weights != nullptr) choice.weight = __ldg(args.topk_weights + i);
  if (call.IsGroup(id)) choice.id = id, choice.rank = call.RankOf(id);
  return choice;
}

// Puts the choices of a token to all ranks; each warp of the block takes some of the ranks.
__device__ inline void PutChoices(const CallArgs& call, const CallSmem& smem, int token,
                                  const SentChoice& choice) {
  const Peers peers(call, smem);
  if (LaneIndex() >= call.n_choices) return;
  const size_t packet = ChoicePacket(call, call.rank, token * call.n_choices + LaneIndex());
  for (int rank = WarpIndex(); rank < call.n_ranks; rank += kWorkerWarps) {
    PutPacket(peers.PacketAt(rank, call.map.choice_packets, packet), smem.epoch,
              {static_cast<uint32_t>(choice.id), __float_as_uint(choice.weight), 0});
  }
}

// Lanes that have a token's first choice on each rank. Called by one warp, converged.
__device__ __forceinline__ uint32_t FirstChoices(const SentChoice& choice) {
  return __ballot_sync(kAllLanes, IsFirstWithKey(choice.rank) && choice.rank >= 0);
}

// Counts a token that is sent, for the statistics. Called by one warp.
__device__ inline void CountSentToken(const DispatchArgs& args, const SentChoice& choice,
                                      uint32_t first_choices) {
  if (choice.rank < 0) return;
  const Totals totals(args.call);
  totals.Add(totals.at.rows_to_group() + choice.id, 1);
  if ((first_choices >> LaneIndex() & 1) == 0) return;
  totals.Add(totals.at.tokens_to_rank() + choice.rank, 1);
  totals.Add(totals.at.bytes_to_rank() + choice.rank, SentTokenBytes(args));
}

// Sends this block's slices of the rank's tokens, and their choices. Called by the workers of a
// block.
template <bool kQuantizes>
class TokenSender {
 public:
  // Reads the first token, before the call has started. `encoded` has room for a token on the wire,
  // if it is quantized.
  __device__ TokenSender(const DispatchArgs& args, const PieceBuffer& buffer, uint8_t* encoded)
      : args_(args),
        // One block encodes a token, since its scales come first.
        slices_(args.call.n_tokens, kQuantizes ? 1 : args.size.given),
        buffer_(buffer),
        encoded_(encoded) {
    Read(slices_.first);
  }

  __device__ void SendAll(const CallSmem& smem) {
    for (int token = slices_.first; token < args_.call.n_tokens; token += slices_.stride) {
      Send(smem, token);
      Read(token + slices_.stride);
    }
  }

 private:
  __device__ void Read(int token) {
    choice_ = ReadSentChoice(args_, token);
    if constexpr (kQuantizes) {
      Encode(token);
    } else {
      vector_ = LoadVector(token, slices_.Begin());
    }
  }

  // This lane's vector of the piece of a token that begins at vector `begin`.
  __device__ int4 LoadVector(int token, int begin) const {
    const PieceShare share(begin, args_.size.given);
    if (token >= args_.call.n_tokens || !share.has_vector) return int4{};
    return ld_global_no_allocate(Vector(TokenAt(args_, token), share.vector));
  }

  __device__ void Send(const CallSmem& smem, int token) {
    const CallArgs& call = args_.call;
    if (slices_.index == 0) PutChoices(call, smem, token, choice_);
    const uint32_t first_choices = FirstChoices(choice_);
    const uint32_t own = __ballot_sync(kAllLanes, choice_.rank == call.rank);
    const PeerPacket to = Peers(call, smem)
                              .PacketAt(max(choice_.rank, 0), call.map.token_packets,
                                        TokenPacket(call, call.rank, token));
    if constexpr (kQuantizes) {
      PutEncoded(smem.epoch, to, first_choices);
    } else {
      // This rank's own tokens do not travel: the receiver reads them where they are.
      PutToken(smem.epoch, token, to, first_choices & ~own);
    }
    if (slices_.index == 0 && WarpIndex() == 0) CountSentToken(args_, choice_, first_choices);
  }

  // Puts this block's slice of a token to the packets `to` of the lanes in `lanes`.
  __device__ void PutToken(uint32_t epoch, int token, PeerPacket to, uint32_t lanes) {
    const int n_vectors = args_.size.given;
    for (int begin = slices_.Begin(); begin < n_vectors; begin += slices_.Step()) {
      const PieceShare share(begin, n_vectors);
      const uint3 values = buffer_.ToPackets(vector_);
      for (uint32_t left = lanes; left != 0; left &= left - 1) {
        const PeerPacket packets = ShuffleAddress(to, __ffs(left) - 1);
        if (share.has_packet) PutPacket(packets + share.packet, epoch, values);
      }
      vector_ = LoadVector(token, begin + slices_.Step());
    }
  }

  __device__ void Encode(int token) {
    if (token >= args_.call.n_tokens) return;
    VisitEncoder(args_, [&](auto encoder) {
      encoder.PutToEach(args_, token, encoded_, /*lanes=*/1, {WarpIndex(), kWorkerWarps});
    });
  }

  // Puts the token that has been encoded to the packets `to` of the lanes in `lanes`.
  __device__ void PutEncoded(uint32_t epoch, PeerPacket to, uint32_t lanes) {
    SyncWorkers();
    const int n_packets = PacketsOfVectors(args_.size.sent());
    for (int first = WarpIndex() * kWarpSize; first < n_packets; first += kWorkerThreads) {
      const int packet = first + LaneIndex();
      const uint32_t* const words = reinterpret_cast<const uint32_t*>(encoded_) + 3 * packet;
      for (uint32_t left = lanes; left != 0; left &= left - 1) {
        const PeerPacket packets = ShuffleAddress(to, __ffs(left) - 1);
        if (packet < n_packets) PutPacket(packets + packet, epoch, {words[0], words[1], words[2]});
      }
    }
    SyncWorkers();
  }

  const DispatchArgs& args_;
  const RowSlices slices_;
  const PieceBuffer buffer_;
  uint8_t* const encoded_;
  SentChoice choice_;
  int4 vector_;  // of the next piece, if the token travels as it is
};

namespace {

// Bytes for a token that a block encodes: whole pieces.
__host__ __device__ size_t EncodedBytes(const TokenSize& size) {
  return size.scales == 0 ? 0 : AlignUp(size.sent() * kVectorBytes, kPieceBytes);
}

// Tells all ranks that this one has started the call, and waits until they have. Called by the
// service warp of the block that records.
__device__ void MeetRanks(const CallArgs& call, DispatchSmem& smem) {
  EndedWait& last = smem.waits[LaneIndex()];
  last = {};
  AnnounceStart(call, smem.call, StartWords::OfDispatch(call));
  const auto on_wait = [&](const EndedWait& wait) {
    last.Count(call, StatsWords::kDispatch);
    last = wait;
  };
  WaitForStarts(call, smem.call, StartWords::OfDispatch(call), Phase::kDispatchStarted,
                /*is_measured=*/true, on_wait);
}

// Counts the ids that name no group. Called by one warp.
__device__ void CountInvalidIds(const DispatchArgs& args) {
  const CallArgs& call = args.call;
  int32_t n_invalid = 0;
  for (int i = LaneIndex(); i < call.n_tokens * call.n_choices; i += kWarpSize) {
    const int32_t id = __ldg(args.group_ids + i);
    n_invalid += !call.IsGroup(id) && id != kNoGroup;
  }
  n_invalid = __reduce_add_sync(kAllLanes, n_invalid);
  if (LaneIndex() != 0) return;
  *args.n_invalid = n_invalid;
  if (n_invalid > 0) Totals(call).Add(StatsWords::kInvalidIds, n_invalid);
}

// Writes the per-rank results. A block whose wait fails later empties them again. Called by the
// service warp of the block that records.
__device__ void WriteResults(const DispatchArgs& args, const DispatchSmem& smem) {
  if (!smem.lacks_choices) {
    for (int rank = LaneIndex(); rank < args.call.n_ranks; rank += kWarpSize) {
      args.handle[rank] = smem.n_messages[rank];
    }
    WriteOffsets(args, smem);
  }
  if (HasFailed(args.call)) LeaveNoRows(args);
}

// Receives what all ranks send. Called by the workers of a block.
template <bool kQuantizes>
__device__ void ReceiveAll(const DispatchArgs& args, DispatchSmem& smem,
                           const ChoiceTables& choices, const PieceBuffer& buffer) {
  TokenReceiver<kQuantizes> receiver(args, smem.call, buffer);
  ReceiveChoices(args, smem, choices);
  SyncWorkers();
  if (smem.lacks_choices) {
    if (WarpIndex() == 0) LeaveNoRows(args);
    return;
  }
  receiver.LookAhead();
  CountRows(args, smem, choices);
  SyncWorkers();
  if (WarpIndex() == 0) LayOutCountedRows(args, smem);
  SyncWorkers();
  if (threadIdx.x == 0) Trace(args.call, kLaidOut);
  if (HasPaddingOrScales(args)) {
    ClearPadding(args, smem, blockIdx.x * kWorkerWarps + WarpIndex(), gridDim.x * kWorkerWarps);
  }
  receiver.ReceiveAll(smem, choices);
}

// The service warp: starts the call and, in the block that records, keeps its books.
__device__ void Serve(const DispatchArgs& args, DispatchSmem& smem, const ChoiceTables& choices,
                      uint8_t* peer_table) {
  const CallArgs& call = args.call;
  StartCall(call, DispatchState(call), smem.call, peer_table);
  if (LaneIndex() == 0) {
    CarveLayout(call, choices.end, smem);
    smem.lacks_choices = false;
  }
  __syncthreads();
  if (smem.call.failed) {
    if (Records()) LeaveNoRows(args);
    return;
  }
  if (LaneIndex() == 0) CountCall(call.plan, DispatchState(call), smem.call);
  if (!Records()) return;
  MeetRanks(call, smem);
  __syncthreads();
  WriteResults(args, smem);
}

template <bool kQuantizes>
__global__ void __launch_bounds__(kServedThreads, 1)
    DispatchLLKernel(const __grid_constant__ DispatchArgs args) {
  extern __shared__ __align__(128) uint8_t tables[];
  __shared__ DispatchSmem smem;
  const CallArgs& call = args.call;
  const PieceBuffer buffer(tables);
  uint8_t* const encoded = tables + kPieceBuffersBytes;
  uint8_t* const peer_table = encoded + EncodedBytes(args.size);
  const ChoiceTables choices(call, peer_table + PeerTable::Bytes(call.n_ranks));
  if (threadIdx.x == 0) Trace(call, kEntered);
  if (!IsWorker()) return Serve(args, smem, choices, peer_table);

  TokenSender<kQuantizes> sender(args, buffer, encoded);
  ClearChoices(choices);
  __syncthreads();
  if (smem.call.failed) return;
  if (threadIdx.x == 0) Trace(call, kPrepared);
  sender.SendAll(smem.call);
  if (threadIdx.x == 0) Trace(call, kSent);
  if (Records()) {  // while the choices are on their way
    if (WarpIndex() == 0) CountInvalidIds(args);
    if (WarpIndex() == 1) AddPendingDispatch(call);
  }
  ReceiveAll<kQuantizes>(args, smem, choices, buffer);
  if (threadIdx.x == 0) Trace(call, kReceived);
  if (Records()) __syncthreads();
}

using Kernel = void (*)(DispatchArgs);

Kernel FindKernel(bool quantizes) {
  return quantizes ? DispatchLLKernel<true> : DispatchLLKernel<false>;
}

}  // namespace

size_t DispatchLLSmemBytes(const CallArgs& call, const TokenSize& size) {
  const ChoiceTables choices(call, nullptr);
  return kPieceBuffersBytes + EncodedBytes(size) + PeerTable::Bytes(call.n_ranks) +
         reinterpret_cast<size_t>(choices.end) + LayoutBytes(call);
}

cudaError_t LoadDispatchLLKernels(int* max_blocks) {
  for (const bool quantizes : {false, true}) {
    const cudaError_t error = LoadKernel(reinterpret_cast<const void*>(FindKernel(quantizes)),
                                         kServedThreads, kDispatchLLSmemBytes, max_blocks);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchDispatchLL(const DispatchArgs& args, cudaStream_t stream, cudaEvent_t started) {
  return LaunchCall(FindKernel(args.encoding != Encoding::kNone), args, kServedThreads,
                    DispatchLLSmemBytes(args.call, args.size), stream, started);
}

}  // namespace jax_ep::p2p
