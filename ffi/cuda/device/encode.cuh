// What becomes of a token before it leaves: nothing, or codes and scales, by core/quantize.h. Each
// way is a struct that says how to send a token to several ranks from where it is, and how to
// encode it in a stage.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/float_types.h"
#include "core/quantize.h"
#include "cuda/device/dispatch_shared.cuh"
#include "cuda/device/encode_block.cuh"
#include "cuda/device/units.cuh"

namespace jax_ep::p2p {

constexpr int kSendUnroll = 8;

// A token that travels as it is.
struct AsItIs {
  static constexpr bool kIsInPlace = false;
  // This rank's own message has no copy of the token: it is read where it is.
  static constexpr bool kSendsToItself = false;

  // Sends this warp's part of a token to the messages `to` of the lanes in `lanes`. Called by one
  // warp, converged.
  __device__ static void ToEach(const DispatchArgs& args, int token, uint8_t* to, uint32_t lanes,
                                Part part) {
    CopyToEach<kSendUnroll>(TokenAt(args, token), to, lanes, args.size.given, part);
  }
};

__device__ __forceinline__ void Unpack(const int4 (&data)[1], float (&values)[kLaneElements],
                                       BFloat16) {
  const uint32_t pairs[] = {static_cast<uint32_t>(data[0].x), static_cast<uint32_t>(data[0].y),
                            static_cast<uint32_t>(data[0].z), static_cast<uint32_t>(data[0].w)};
#pragma unroll
  for (int i = 0; i < kLaneElements / 2; ++i) {
    values[2 * i] = FloatFromBits(pairs[i] << 16);
    values[2 * i + 1] = FloatFromBits(pairs[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ void Unpack(const int4 (&data)[2], float (&values)[kLaneElements],
                                       float) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    values[4 * i] = __int_as_float(data[i].x);
    values[4 * i + 1] = __int_as_float(data[i].y);
    values[4 * i + 2] = __int_as_float(data[i].z);
    values[4 * i + 3] = __int_as_float(data[i].w);
  }
}

// A token of elements T that travels in Format.
template <class Format, class T>
struct Quantized {
  static constexpr bool kIsInPlace = true;
  static constexpr bool kSendsToItself = true;

  __device__ static void ToEach(const DispatchArgs& args, int token, uint8_t* to, uint32_t lanes,
                                Part part) {
    const InputScale input_scale = ReadInputScale(args);
    const uint8_t* const from = TokenAt(args, token);
    const int step = part.n_parts * kWarpElements;
    int element = part.index * kWarpElements + LaneIndex() * kLaneElements;
    int4 data[kVectors], next[kVectors];
    // Lanes beyond the end encode the last elements again, not zeros, which take more steps.
    Load(args, from, min(element, args.hidden_size - kLaneElements), next);
    for (int first = part.index * kWarpElements; first < args.hidden_size;
         first += step, element += step) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) data[i] = next[i];
      Load(args, from, element + step, next);
      const bool has_elements = element < args.hidden_size;
      const LaneCodes<Format> codes = Encode(data, input_scale);
      for (uint32_t left = lanes; left != 0; left &= left - 1) {
        uint8_t* const message = static_cast<uint8_t*>(ShuffleAddress(to, __ffs(left) - 1));
        if (has_elements) Store(codes, message, Vector(message, args.size.scales), element);
      }
    }
  }

  // Encodes the token that was loaded behind the scales: its codes are shorter than what has been
  // read of it. Called by one warp, converged.
  __device__ static void InPlace(const DispatchArgs& args, uint8_t* scales) {
    const InputScale input_scale = ReadInputScale(args);
    uint8_t* const token = Vector(scales, args.size.scales);
    for (int first = 0; first < args.hidden_size; first += kWarpElements) {
      const int element = first + LaneIndex() * kLaneElements;
      const bool has_elements = element < args.hidden_size;
      const int from = min(element, args.hidden_size - kLaneElements) / kLaneElements;
      int4 data[kVectors];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        data[i] = reinterpret_cast<const int4*>(token)[from * kVectors + i];
      }
      const LaneCodes<Format> codes = Encode(data, input_scale);
      __syncwarp();
      if (has_elements) Store(codes, scales, token, element);
    }
  }

 private:
  static constexpr int kVectors = kLaneElements * sizeof(T) / kVectorBytes;

  __device__ static InputScale ReadInputScale(const DispatchArgs& args) {
    return InputScale::Make(args.input_scale == nullptr ? 1.0f : *args.input_scale);
  }

  // Leaves `data` as it is where there are no elements: what it encodes to is not stored.
  __device__ static void Load(const DispatchArgs& args, const uint8_t* from, int element,
                              int4 (&data)[kVectors]) {
    if (element >= args.hidden_size) return;
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

  // Called by all lanes that have elements; `element` is the lane's first one.
  __device__ static void Store(const LaneCodes<Format>& lane, uint8_t* scales, uint8_t* codes,
                               int element) {
    using Words = typename LaneCodes<Format>::Words;
    reinterpret_cast<Words*>(codes)[element / kLaneElements] = lane.words;
    if (element % Format::kBlockSize != 0) return;
    reinterpret_cast<typename Format::Scale*>(scales)[element / Format::kBlockSize] = lane.scale;
  }
};

// Calls visit with the way in which the tokens of a call that quantises travel.
template <class Visit>
__device__ __forceinline__ void VisitEncoding(const DispatchArgs& args, const Visit& visit) {
  const auto of_type = [&](auto token) {
    using T = decltype(token);
    switch (args.encoding) {
      case Encoding::kAsItIs:
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
  if (args.token_type == RowType::kBFloat16) return of_type(BFloat16{});
  of_type(float{});
}

}  // namespace jax_ep::p2p
