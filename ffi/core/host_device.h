// Marks functions that are compiled for the host and for the device, so that both compute the same
// bits; and those of kernels that simulations also run, compiled for the host.
#pragma once

#if defined(__CUDACC__)
#define JAX_EP_HOST_DEVICE __host__ __device__
#define JAX_EP_DEVICE __device__
#else
#define JAX_EP_HOST_DEVICE
#define JAX_EP_DEVICE
#endif

// Forces inlining: into callers compiled for a newer processor than the rest, for instance.
#define JAX_EP_ALWAYS_INLINE inline __attribute__((always_inline))
