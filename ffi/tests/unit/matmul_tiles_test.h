// Tests of the order of a grouped matmul's tiles, run by host_test.
#pragma once

namespace jax_ep::matmul {

void RunMatmulTilesTests();

}  // namespace jax_ep::matmul
