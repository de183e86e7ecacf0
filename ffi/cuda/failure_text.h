// The error of a call that has failed, from what its kernel left. Needs no CUDA.
#pragma once

#include <cstdint>

#include "core/status.h"
#include "cuda/group_config.h"

namespace jax_ep::p2p {

// `word` is Failure::ToWord() of a call of `rank`; 0 = no failure, which is ok.
Status DescribeFailure(const GroupConfig& config, int rank, uint64_t word);

}  // namespace jax_ep::p2p
