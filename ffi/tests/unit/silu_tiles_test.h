// Tests of the tile scheduler of fused_silu, run by host_test.
#pragma once

namespace jax_ep::silu {

void RunSiluTilesTests();

}  // namespace jax_ep::silu
