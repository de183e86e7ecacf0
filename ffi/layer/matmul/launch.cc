// Selects the kernels for the current device.

#include "layer/matmul/hopper_elements.h"
#include "layer/matmul/kernels.h"

namespace jax_ep::p2p {

#ifndef JAX_EP_MATMUL_HOPPER  // built for other architectures only
cudaError_t LaunchHopperMatmul(const MatmulCall& call, cudaStream_t stream) {
  return LaunchAmpereMatmul(call, stream);
}

cudaError_t hopper::LaunchBFloat16(const MatmulCall& call, cudaStream_t stream, Swap) {
  return LaunchAmpereMatmul(call, stream);
}
#endif

cudaError_t LaunchMatmul(const MatmulCall& call, cudaStream_t stream) {
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return error;
  constexpr int kHopper = 9;
  error = major == kHopper ? LaunchHopperMatmul(call, stream) : LaunchAmpereMatmul(call, stream);
  if (error != cudaSuccess) cudaGetLastError();  // clears it: the next launch must not report it
  return error;
}

}  // namespace jax_ep::p2p
