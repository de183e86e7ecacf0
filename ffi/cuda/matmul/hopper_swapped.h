// A grouped matmul for Hopper whose time depends on the rows of each group, not on their number
// rounded up to a tile: bfloat16, in the form kWeights, to bfloat16.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/host_device.h"
#include "core/matmul_call.h"
#include "core/matmul_tiles.h"

namespace jax_ep::p2p {

constexpr uint32_t kSmallTileRows = 192, kLargeTileRows = 256;

// In device memory, filled by swapped_tables.cuh.
struct SwappedTables {
  MatmulTileTable tiles;
  uint32_t* tile_rows;        // the most of a tile: one of the above, or 0: the kernel has no work
  uint32_t forced_tile_rows;  // by a test; 0 = by the rule

  JAX_EP_HOST_DEVICE bool exist() const { return tile_rows != nullptr; }
};

// Writes the rows in use. Like those of kernels.h, for sizes above 0.
cudaError_t LaunchSwappedMatmul(const MatmulCall& call, const SwappedTables& tables, int n_sms,
                                cudaStream_t stream);

}  // namespace jax_ep::p2p
