// The error of a call that has failed, from what its kernel left. Needs no CUDA.
#pragma once

#include <cstdint>

#include "core/status.h"
#include "p2p/launch/call_args.h"
#include "p2p/open/group_config.h"

namespace jax_ep::p2p {

// Whether a rank's handle, the result of a dispatch, was changed before combine or its backward.
bool IsOfHandle(Phase phase);
// Whether a rank waited in vain for another one of its group.
bool WaitsForPeer(Phase phase);

// `word` is Failure::ToWord() of a call of `rank`; 0 = no failure, which is ok.
Status DescribeFailure(const GroupConfig& config, int rank, uint64_t word);

}  // namespace jax_ep::p2p
