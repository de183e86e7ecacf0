// Where the tokens are that another kernel brings while the call runs.
#pragma once

#include "p2p/device/arriving.cuh"
#include "p2p/device/copy.cuh"
#include "p2p/dispatch/dispatch.h"

namespace jax_ep::p2p {

// A token, which may be one of this rank's beside those that arrive.
__device__ __forceinline__ const uint8_t* FindToken(const DispatchArgs& args, int token) {
  const int own = token - args.arriving.first_own();
  const bool is_own = static_cast<uint32_t>(own) < static_cast<uint32_t>(args.arriving.n_tokens);
  return Vector(is_own ? args.arriving.own : args.tokens,
                static_cast<int64_t>(is_own ? own : token) * args.size.given);
}

// Whether there are tokens to wait for.
__device__ __forceinline__ bool HasArriving(const DispatchArgs& args) {
  return args.arriving.words != nullptr;
}

}  // namespace jax_ep::p2p
