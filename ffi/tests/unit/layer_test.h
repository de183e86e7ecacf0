// Tests of dispatch, combine and its backward with threads for ranks, run by host_test.
#pragma once

namespace jax_ep::host {

void RunLayerTests();

}  // namespace jax_ep::host
