// Tests of the rendezvous of ranks, run by host_test.
#pragma once

namespace jax_ep::host {

void RunRendezvousTests();

}  // namespace jax_ep::host
