// Order of a device's calls across streams. Calls must run one after the other even when XLA puts
// them on several streams: their kernels count calls without locks, and two at a time could keep
// each other's blocks off the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/status.h"

namespace jax_ep::p2p {

// Stream ordering of a call relative to other calls of its program. Python passes the same values
// as an attribute. A call's value never changes: XLA captures calls and later updates the graphs.
enum class StreamOrder : int32_t {
  kSerial = 0,      // all calls of the program are on one stream
  kAfterAsync = 1,  // waits for asynchronous calls, which are on other streams
  kAsync = 2,       // is asynchronous
};

// Creates the device's events. Called when a group is opened.
Status CreateAsyncEvents(int device);

// Events of the device's last asynchronous call.
struct AsyncEvents {
  cudaEvent_t started = nullptr;  // all its blocks are resident
  cudaEvent_t done = nullptr;
};

// Null events: CreateAsyncEvents has not been called for the device.
AsyncEvents FindAsyncEvents(int device);

// Makes `stream` wait until the device's last asynchronous call is done, or has started.
cudaError_t WaitForDone(const AsyncEvents& events, cudaStream_t stream);
cudaError_t WaitForStarted(const AsyncEvents& events, cudaStream_t stream);

// Launches a call in order by launch(started), where `started` is null or the event that the launch
// must complete once all blocks are resident.
template <class Launch>
cudaError_t LaunchInOrder(int device, cudaStream_t stream, StreamOrder order,
                          const Launch& launch) {
  if (order == StreamOrder::kSerial) return launch(nullptr);
  const AsyncEvents events = FindAsyncEvents(device);
  if (events.done == nullptr) return cudaErrorInvalidDevice;
  cudaError_t error = WaitForDone(events, stream);
  if (error == cudaSuccess) error = launch(order == StreamOrder::kAsync ? events.started : nullptr);
  if (error != cudaSuccess || order != StreamOrder::kAsync) return error;
  return cudaEventRecord(events.done, stream);
}

}  // namespace jax_ep::p2p
