// A device's position in the mesh.
#pragma once

#include <cstdint>

namespace jax_ep {

struct MeshCoordinate {
  int64_t replica;  // of the EP group: the index along all other axes of the mesh
  int64_t rank;     // along the EP axis
};

}  // namespace jax_ep
