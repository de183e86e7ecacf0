// What jax.ffi registers: each feature adds its handlers, by the names that Python calls them by.
#pragma once

#include <vector>

#include "xla/ffi/api/c_api.h"

namespace jax_ep {

struct Target {
  const char* name;
  XLA_FFI_Handler* execute;
  XLA_FFI_Handler* instantiate = nullptr;  // null: the calls have no state
};
using Targets = std::vector<Target>;

}  // namespace jax_ep
