// The linked kernels that use NVSHMEM, as bytes.
#pragma once

namespace jax_ep::rail {

// For cudaLibraryLoadData.
const void* RailFatbin();

}  // namespace jax_ep::rail
