#include "cuda/call_order.h"

#include <atomic>
#include <map>
#include <mutex>

#include "cuda/runtime.h"

namespace jax_ep::p2p {
namespace {

std::atomic<bool> expects_overlap{false};

// The end of the last call of each device that runs beside others. Never destroyed: graphs that XLA
// has captured refer to them.
struct Events {
  std::mutex mutex;
  std::map<int, cudaEvent_t> by_device;

  cudaEvent_t Find(int device) {
    std::lock_guard lock(mutex);
    const auto it = by_device.find(device);
    return it == by_device.end() ? nullptr : it->second;
  }
};

Events& AllEvents() {
  static Events* const events = new Events;
  return *events;
}

}  // namespace

Status PrepareCallOrder(int device) {
  Events& events = AllEvents();
  std::lock_guard lock(events.mutex);
  if (events.by_device.count(device)) return {};
  const ScopedDevice scoped(device);
  cudaEvent_t event = nullptr;
  const Status status = ToStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event");
  if (status.ok()) events.by_device[device] = event;
  return status;
}

void ExpectOverlap() { expects_overlap.store(true, std::memory_order_release); }

cudaError_t AwaitOverlap(int device, cudaStream_t stream) {
  if (!expects_overlap.load(std::memory_order_acquire)) return cudaSuccess;
  const cudaEvent_t event = AllEvents().Find(device);
  if (event == nullptr) return cudaErrorInvalidDevice;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream, &capture);
  if (error != cudaSuccess) return error;
  // A graph waits for what the event says when the graph runs.
  const bool is_captured = capture == cudaStreamCaptureStatusActive;
  return cudaStreamWaitEvent(stream, event,
                             is_captured ? cudaEventWaitExternal : cudaEventWaitDefault);
}

cudaError_t RecordOverlap(int device, cudaStream_t stream) {
  const cudaEvent_t event = AllEvents().Find(device);
  return event == nullptr ? cudaErrorInvalidDevice : cudaEventRecord(event, stream);
}

}  // namespace jax_ep::p2p
