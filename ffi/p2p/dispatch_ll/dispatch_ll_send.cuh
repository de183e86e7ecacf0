// The sending half of an LL dispatch: puts the choices of a token to all ranks, and the token
// to the ranks that hold one of its choices.
#pragma once

#include <algorithm>

#include "core/routing.h"
#include "p2p/device/ll_packets.cuh"
#include "p2p/device/peer.cuh"
#include "p2p/device/stats.cuh"
#include "p2p/dispatch/encode.cuh"
#include "p2p/dispatch_ll/dispatch_ll_layout.cuh"

namespace jax_ep::p2p {

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

}  // namespace jax_ep::p2p
