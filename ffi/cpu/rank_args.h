// What one rank brings to a call; each operation adds its buffers.
#pragma once

#include <cstdint>
#include <memory>

#include "core/ep_config.h"
#include "cpu/group.h"

namespace jax_ep {

struct RankArgs {
  virtual ~RankArgs() = default;

  EpConfig config;
  int64_t n_tokens;  // T of this call
  std::shared_ptr<HostGroup> group;
  Device device;
};

}  // namespace jax_ep
