// Tests of p2p groups in the workspaces of others, as far as they need no GPU; run by host_test.
#pragma once

namespace jax_ep {

void RunOpenGroupsTests();

}  // namespace jax_ep
