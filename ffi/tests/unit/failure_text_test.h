// Tests of the errors of calls that have failed; run by host_test.
#pragma once

namespace jax_ep {

void RunFailureTextTests();

}  // namespace jax_ep
