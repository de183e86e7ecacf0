// Calls of a device one after the other, on whichever streams they run. Their kernels count calls
// without locks, and of two at a time each may keep the other from getting its blocks.
#pragma once

#include <cuda_runtime_api.h>

#include "core/status.h"

namespace jax_ep::p2p {

// When a group is opened: what the calls of a device need.
Status PrepareCallOrder(int device);

// As soon as an executable holds a call that runs beside others. Before, calls are in order, as all
// are on one stream, and nothing is waited for.
void ExpectOverlap();

// Before a call is launched on `stream`: behind the last one that runs beside others.
cudaError_t AwaitOverlap(int device, cudaStream_t stream);
// Behind the launch of a call that runs beside others.
cudaError_t RecordOverlap(int device, cudaStream_t stream);

// Launches a call in order.
template <class Launch>
cudaError_t LaunchInOrder(int device, cudaStream_t stream, bool overlaps, const Launch& launch) {
  cudaError_t error = AwaitOverlap(device, stream);
  if (error == cudaSuccess) error = launch();
  if (error == cudaSuccess && overlaps) error = RecordOverlap(device, stream);
  return error;
}

}  // namespace jax_ep::p2p
