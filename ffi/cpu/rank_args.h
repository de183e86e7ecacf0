// What one rank brings to a call. Each operation adds its operands.
#pragma once

#include <memory>

#include "cpu/group.h"

namespace jax_ep {

struct RankArgs {
  virtual ~RankArgs() = default;

  std::shared_ptr<HostGroup> group;
  Device device;

  const GroupSizes& sizes() const { return group->sizes(); }
};

}  // namespace jax_ep
