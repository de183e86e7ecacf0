// The arguments of one rank's call. Each operation adds its operands.
#pragma once

#include <cstdint>
#include <memory>

#include "host/group.h"

namespace jax_ep::host {

struct RankArgs {
  virtual ~RankArgs() = default;

  std::shared_ptr<HostGroup> group;
  Device device;

  const GroupSizes& sizes() const { return group->sizes(); }
  virtual int64_t NumTokens() const { return 0; }  // T, for messages
};

}  // namespace jax_ep::host
