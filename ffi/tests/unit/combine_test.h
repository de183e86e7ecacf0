// Tests of the sums of combine, run by host_test.
#pragma once

namespace jax_ep::host {

void RunCombineTests();

}  // namespace jax_ep::host
