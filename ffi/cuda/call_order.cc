#include "cuda/call_order.h"

#include <map>
#include <mutex>

#include "cuda/runtime.h"

namespace jax_ep::p2p {
namespace {

// Events are never destroyed: graphs that XLA has captured refer to them.
struct Events {
  std::mutex mutex;
  std::map<int, OverlapEvents> by_device;
};

Events& AllEvents() {
  static Events* const events = new Events;
  return *events;
}

Status MakeEvent(cudaEvent_t* event) {
  return ToStatus(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "event");
}

}  // namespace

Status PrepareCallOrder(int device) {
  Events& events = AllEvents();
  std::lock_guard lock(events.mutex);
  if (events.by_device.count(device)) return {};
  const ScopedDevice scoped(device);
  OverlapEvents made;
  Status status = MakeEvent(&made.begun);
  if (status.ok()) status = MakeEvent(&made.ended);
  if (status.ok()) events.by_device[device] = made;
  return status;
}

OverlapEvents FindOverlapEvents(int device) {
  Events& events = AllEvents();
  std::lock_guard lock(events.mutex);
  const auto it = events.by_device.find(device);
  return it == events.by_device.end() ? OverlapEvents{} : it->second;
}

cudaError_t AwaitEnd(const OverlapEvents& events, cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream, &capture);
  if (error != cudaSuccess) return error;
  // A graph waits for what the event says when the graph runs.
  const bool is_captured = capture == cudaStreamCaptureStatusActive;
  return cudaStreamWaitEvent(stream, events.ended,
                             is_captured ? cudaEventWaitExternal : cudaEventWaitDefault);
}

cudaError_t AwaitBegin(const OverlapEvents& events, cudaStream_t stream) {
  return cudaStreamWaitEvent(stream, events.begun);
}

}  // namespace jax_ep::p2p
