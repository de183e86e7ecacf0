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

// Of the last call of a device that runs beside others.
struct OverlapEvents {
  cudaEvent_t begun = nullptr;  // it has its multiprocessors
  cudaEvent_t ended = nullptr;
};

// Null where PrepareCallOrder has not been called.
OverlapEvents FindOverlapEvents(int device);

// Lets `stream` wait until the call has ended, or has its multiprocessors.
cudaError_t AwaitEnd(const OverlapEvents& events, cudaStream_t stream);
cudaError_t AwaitBegin(const OverlapEvents& events, cudaStream_t stream);

// Launches a call in order, by launch(null or the event of its beginning).
template <class Launch>
cudaError_t LaunchInOrder(int device, cudaStream_t stream, Order order, const Launch& launch) {
  if (order == Order::kAlone) return launch(nullptr);
  const OverlapEvents events = FindOverlapEvents(device);
  if (events.ended == nullptr) return cudaErrorInvalidDevice;
  cudaError_t error = AwaitEnd(events, stream);
  if (error == cudaSuccess) error = launch(order == Order::kBeside ? events.begun : nullptr);
  if (error != cudaSuccess || order != Order::kBeside) return error;
  return cudaEventRecord(events.ended, stream);
}

}  // namespace jax_ep::p2p
