// Calls of a device one after the other, on whichever streams they run. Their kernels count calls
// without locks, and of two at a time each may keep the other from getting its blocks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/status.h"

namespace jax_ep::p2p {

// When a group is opened: what the calls of a device need.
Status PrepareCallOrder(int device);

// How a call stands to others. The same values as in Python, where it says what a program knows: it
// must stay the same for a call, as XLA captures calls and then updates its graphs.
enum class Order : int32_t {
  kAlone = 0,   // all calls are on one stream
  kBehind = 1,  // it waits for calls that run beside others
  kBeside = 2,  // it is one of these
};

// Before a call is launched on `stream`: behind the last one that runs beside others.
cudaError_t AwaitOverlap(int device, cudaStream_t stream);
// Behind the launch of a call that runs beside others.
cudaError_t RecordOverlap(int device, cudaStream_t stream);

// Launches a call in order.
template <class Launch>
cudaError_t LaunchInOrder(int device, cudaStream_t stream, Order order, const Launch& launch) {
  if (order == Order::kAlone) return launch();
  cudaError_t error = AwaitOverlap(device, stream);
  if (error == cudaSuccess) error = launch();
  if (error == cudaSuccess && order == Order::kBeside) error = RecordOverlap(device, stream);
  return error;
}

}  // namespace jax_ep::p2p
