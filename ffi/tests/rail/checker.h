// What the results of a call must be, by the reference that the tests of p2p use.
#pragma once

#include "tests/rail/actor.h"

namespace jax_ep::rail {

// Checks what `rank` has of a call that has just ended; reports to the network what is wrong.
void CheckCall(World& world, int rank, const Call& call);

}  // namespace jax_ep::rail
