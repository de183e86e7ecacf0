// Which groups of rows a node has, and what they are called inside it. The same in Python:
// jax_ep/nodes/routing.py.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/routing.h"

namespace jax_ep::rail {

// Of all nodes, node n has the groups from n * n_groups on. Inside it, the rows of an expert are a
// group for each node that tokens come from (core/routing.h).
struct NodeGroups {
  int32_t n_groups;  // of a node
  int32_t n_nodes;   // N

  JAX_EP_HOST_DEVICE constexpr bool Has(int32_t node, int32_t id) const {
    const uint32_t first = static_cast<uint32_t>(node) * n_groups;
    return static_cast<uint32_t>(id) - first < static_cast<uint32_t>(n_groups);
  }
  // The group inside `node` of a choice of a token from `source`. Invalid ids stay invalid at their
  // own node, which counts them; other nodes' groups become none.
  JAX_EP_HOST_DEVICE constexpr int32_t Within(int32_t node, int32_t source, int32_t id) const {
    if (Has(node, id)) return (id - node * n_groups) * n_nodes + source;
    const bool is_group = id >= 0 && id < n_nodes * n_groups;
    return source == node && !is_group && id != kNoGroup ? kInvalidGroup : kNoGroup;
  }
};

namespace node_groups_test {
constexpr NodeGroups kTwo{/*n_groups=*/8, /*n_nodes=*/2};
static_assert(kTwo.Has(0, 7) && !kTwo.Has(0, 8) && kTwo.Has(1, 8) && !kTwo.Has(1, 16));
static_assert(!kTwo.Has(0, kNoGroup) && !kTwo.Has(1, kNoGroup));
static_assert(kTwo.Within(1, 0, 10) == 4 && kTwo.Within(1, 1, 10) == 5, "by source");
static_assert(kTwo.Within(0, 0, 10) == kNoGroup, "of another node");
static_assert(kTwo.Within(1, 1, 16) == kInvalidGroup && kTwo.Within(1, 0, 16) == kNoGroup,
              "counted once");
static_assert(kTwo.Within(1, 1, kNoGroup) == kNoGroup, "not a group, but valid");
}  // namespace node_groups_test

}  // namespace jax_ep::rail
