// Targets as Python gets them: name -> handler, or stage -> handler.
#pragma once

#include <nanobind/nanobind.h>

#include "xla/target.h"

namespace jax_ep {

inline nanobind::dict ToDict(const Targets& targets) {
  const auto capsule = [](XLA_FFI_Handler* handler) {
    return nanobind::capsule(reinterpret_cast<void*>(handler));
  };
  nanobind::dict dict;
  for (const Target& target : targets) {
    if (target.instantiate == nullptr) {
      dict[target.name] = capsule(target.execute);
      continue;
    }
    nanobind::dict stages;
    stages["instantiate"] = capsule(target.instantiate);
    stages["execute"] = capsule(target.execute);
    dict[target.name] = stages;
  }
  return dict;
}

}  // namespace jax_ep
