#include "p2p/launch/stream_order.h"

#include <map>
#include <mutex>

#include "p2p/launch/cuda_status.h"

namespace jax_ep::p2p {
namespace {

// Never destroyed: graphs that XLA has captured refer to the events.
struct Devices {
  std::mutex mutex;
  std::map<int, AsyncEvents> events;
};

Devices& AllDevices() {
  static Devices* const devices = new Devices;
  return *devices;
}

Status MakeEvent(cudaEvent_t* event) {
  return ToStatus(cudaEventCreateWithFlags(event, cudaEventDisableTiming),
                  "creating an event for asynchronous calls");
}

}  // namespace

Status CreateAsyncEvents(int device) {
  Devices& devices = AllDevices();
  std::lock_guard lock(devices.mutex);
  if (devices.events.count(device)) return {};
  const ScopedDevice scoped(device);
  AsyncEvents made;
  Status status = MakeEvent(&made.started);
  if (status.ok()) status = MakeEvent(&made.done);
  if (status.ok()) devices.events[device] = made;
  return status;
}

AsyncEvents FindAsyncEvents(int device) {
  Devices& devices = AllDevices();
  std::lock_guard lock(devices.mutex);
  const auto it = devices.events.find(device);
  return it == devices.events.end() ? AsyncEvents{} : it->second;
}

cudaError_t WaitForDone(const AsyncEvents& events, cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream, &capture);
  if (error != cudaSuccess) return error;
  // External: a graph waits for the event's state at the time the graph runs.
  const bool is_captured = capture == cudaStreamCaptureStatusActive;
  return cudaStreamWaitEvent(stream, events.done,
                             is_captured ? cudaEventWaitExternal : cudaEventWaitDefault);
}

cudaError_t WaitForStarted(const AsyncEvents& events, cudaStream_t stream) {
  return cudaStreamWaitEvent(stream, events.started);
}

}  // namespace jax_ep::p2p
