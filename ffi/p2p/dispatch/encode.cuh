// Encoders: how a token becomes the scales and payload of its messages, by core/quantize.h. An
// encoder is a struct that puts a token to several ranks straight from where it is. If it is in
// place, it also encodes a token in a stage, from where bulk copies send it.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/float_types.h"
#include "core/quantize.h"
#include "p2p/device/copy.cuh"
#include "p2p/device/encode_block.cuh"
#include "p2p/device/peer.cuh"
#include "p2p/device/reduce.cuh"
#include "p2p/device/work.cuh"
#include "p2p/dispatch/dispatch_smem.cuh"

namespace jax_ep::p2p {

constexpr int kSendUnroll = 8;

// Tokens travel as they are.
struct Passthrough {
  static constexpr bool kIsInPlace = false;
  // This rank's own messages carry no payload: the receiver reads the token where it is.
  static constexpr bool kSendsToItself = false;

  // Puts this warp's slice of a token to the messages `to` of the lanes in `lanes`. Called by one
  // warp, converged.
  __device__ static void PutToEach(const DispatchArgs& args, int token, PeerPtr to, uint32_t lanes,
                                   Slice slice) {
    CopyToEach<kSendUnroll>(FindToken(args, token), to, lanes, args.size.given, slice);
  }
};

// Tokens travel as they are, scales and codes, in a call that quantizes others.
struct Encoded {
  static constexpr bool kIsInPlace = false;
  static constexpr bool kSendsToItself = true;

  // Puts a token likewise; `To` is one of copy.cuh, or in shared memory.
  template <class To>
  __device__ static void PutToEach(const DispatchArgs& args, int token, To to, uint32_t lanes,
                                   Slice slice) {
    constexpr int kUnroll = 4;  // tokens are short
    const uint8_t* const from = FindToken(args, token);
    const int end = slice.End(args.size.sent());
    for (int first = slice.Begin(args.size.sent()) + LaneIndex(); first - LaneIndex() < end;
         first += kUnroll * kWarpSize) {
      int4 data[kUnroll];
      LoadVectors(from, first, end, data);
      for (uint32_t left = lanes; left != 0; left &= left - 1) {
        const To message = ShuffleAddress(to, __ffs(left) - 1);
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int vector = first + u * kWarpSize;
          if (vector < end) PutScalar(message + VectorOffset(vector), data[u]);
        }
      }
    }
  }
};

// Tokens of element type T travel in Format. Every rank gets the codes, the token's own included.
template <class Format, class T>
struct Quantized {
  static constexpr bool kIsInPlace = true;
  static constexpr bool kSendsToItself = true;

  // Puts this warp's slice of a token to the messages `to` of the lanes in `lanes`. Called by one
  // warp, converged. `To`: see copy.cuh.
  template <class To>
  __device__ static void PutToEach(const DispatchArgs& args, int token, To to, uint32_t lanes,
                                   Slice slice) {
    const InputScale input_scale = ReadInputScale(args);
    const uint8_t* const from = FindToken(args, token);
    const int step = slice.n_slices * kWarpElements;
    int element = slice.index * kWarpElements + LaneIndex() * kLaneElements;
    int4 data[kVectors], next[kVectors];
    // Lanes beyond the end encode the last elements once more. Zeros would take the slow path.
    Load(args, from, min(element, args.n_elements() - kLaneElements), next);
    for (int first = slice.index * kWarpElements; first < args.n_elements();
         first += step, element += step) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) data[i] = next[i];
      Load(args, from, element + step, next);
      const bool has_elements = element < args.n_elements();
      const LaneCodes<Format> codes = Encode(data, input_scale);
      for (uint32_t left = lanes; left != 0; left &= left - 1) {
        const To message = ShuffleAddress(to, __ffs(left) - 1);
        if (has_elements) Put(codes, message, message + VectorOffset(args.size.scales), element);
      }
    }
  }

  // Encodes the token that has been loaded after the space for its scales, and writes the codes
  // over it: they are shorter than what has been read before. Called by one warp, converged.
  __device__ static void EncodeInPlace(const DispatchArgs& args, uint8_t* scales) {
    const InputScale input_scale = ReadInputScale(args);
    uint8_t* const token = Vector(scales, args.size.scales);
    for (int first = 0; first < args.n_elements(); first += kWarpElements) {
      const int element = first + LaneIndex() * kLaneElements;
      const bool has_elements = element < args.n_elements();
      const int from = min(element, args.n_elements() - kLaneElements) / kLaneElements;
      int4 data[kVectors];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        data[i] = reinterpret_cast<const int4*>(token)[from * kVectors + i];
      }
      const LaneCodes<Format> codes = Encode(data, input_scale);
      __syncwarp();
      if (has_elements) Put(codes, scales, token, element);
    }
  }

 private:
  static constexpr int kVectors = kLaneElements * sizeof(T) / kVectorBytes;

  __device__ static InputScale ReadInputScale(const DispatchArgs& args) {
    return InputScale::Make(args.input_scale == nullptr ? 1.0f : *args.input_scale);
  }

  // Leaves `data` unchanged beyond the last element; what it encodes to is not stored.
  __device__ static void Load(const DispatchArgs& args, const uint8_t* from, int element,
                              int4 (&data)[kVectors]) {
    if (element >= args.n_elements()) return;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      data[i] = ld_global_no_allocate(Vector(from, element / kLaneElements * kVectors + i));
    }
  }

  // Called by one warp, converged.
  __device__ static LaneCodes<Format> Encode(const int4 (&data)[kVectors],
                                             const InputScale& input_scale) {
    float values[kLaneElements];
    Unpack(data, values, T{});
    return EncodeBlock<Format>(values, input_scale);
  }

  // Stores the codes of a lane whose first element is `element`, and their scale once per block.
  // Called by all lanes that have elements. `To`: see copy.cuh.
  template <class To>
  __device__ static void Put(const LaneCodes<Format>& lane, To scales, To codes, int element) {
    using Words = typename LaneCodes<Format>::Words;
    using Scale = typename Format::Scale;
    PutScalar(codes + element / kLaneElements * sizeof(Words), lane.words);
    if (element % Format::kBlockSize != 0) return;
    PutScalar(scales + element / Format::kBlockSize * sizeof(Scale), lane.scale);
  }
};

// Calls visit(encoder) with the encoder of a call that quantizes.
template <class Visit>
__device__ __forceinline__ void VisitEncoder(const DispatchArgs& args, const Visit& visit) {
  const auto of_type = [&](auto token) {
    using T = decltype(token);
    switch (args.encoding) {
      case Encoding::kNone:
        break;
      case Encoding::kBlockwiseFp8:
        return visit(Quantized<BlockwiseFp8, T>{});
      case Encoding::kMxFp8:
        return visit(Quantized<MxFp8, T>{});
      case Encoding::kMxFp4:
        return visit(Quantized<MxFp4, T>{});
      case Encoding::kNvFp4:
        return visit(Quantized<NvFp4, T>{});
    }
  };
  if (args.are_encoded) return visit(Encoded{});
  if (args.token_type == RowType::kBFloat16) return of_type(BFloat16{});
  of_type(float{});
}

}  // namespace jax_ep::p2p
