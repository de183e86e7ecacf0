// Tests of the token formats that quantize, run by host_test.
#pragma once

namespace jax_ep::host {

void RunFormatTests();

}  // namespace jax_ep::host
