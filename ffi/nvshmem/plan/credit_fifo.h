// Credit FIFOs: the items that one rank sends to another in all calls of a kind, through a ring of
// `depth` slots.
//
// Item i, counted from the first call on, goes to slot i % depth. The word of that slot is an
// epoch word with the item's lap, i / depth + 1, as its epoch. So nothing is cleared between laps
// or between calls, and no call has to wait until another one has ended.
//
// The receiver returns credits: it counts the items that it has taken in a word of the sender. The
// sender may send item i once fewer than `depth` items before it have not been taken. Through a
// network, credits are added, not stored, since it may deliver two puts in either order.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/message.h"

namespace jax_ep::rail {

struct CreditFifo {
  int64_t depth;

  JAX_EP_HOST_DEVICE constexpr int64_t Slot(int64_t item) const { return item % depth; }

  JAX_EP_HOST_DEVICE constexpr uint64_t Word(int64_t item, uint32_t value) const {
    return MakeEpochWord(Lap(item), value);
  }
  JAX_EP_HOST_DEVICE constexpr bool HasArrived(uint64_t word, int64_t item) const {
    return IsOfEpoch(word, Lap(item));
  }

  // Whether the sender may send `item`, by the credits that it has.
  JAX_EP_HOST_DEVICE constexpr bool HasRoom(int64_t item, int64_t credits) const {
    return item - credits < depth;
  }

 private:
  // 32 bits without 0, which is the lap of slots that nothing was sent to.
  JAX_EP_HOST_DEVICE constexpr uint32_t Lap(int64_t item) const {
    return static_cast<uint32_t>(item / depth % 0xffffffff) + 1;
  }
};

}  // namespace jax_ep::rail
