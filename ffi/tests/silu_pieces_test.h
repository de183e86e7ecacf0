// Tests of which warp of fused_silu takes what, run by host_test.
#pragma once

namespace jax_ep {

void RunSiluPiecesTests();

}  // namespace jax_ep
