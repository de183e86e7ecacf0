// The FFI state of one custom call in one executable: its attributes, decoded once. Its address
// also identifies the call site: by inlining functions, XLA makes several calls of one, with equal
// attributes, but each has its own state. The rendezvous of the ranks is keyed by it.
#pragma once

#include <string>

#include "core/formats.h"
#include "core/operands.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep::host {

namespace ffi = xla::ffi;

struct CallSite {
  static ffi::TypeId id;

  std::string group;     // key of the group
  RowFormat row_format;  // of a dispatch
  CombineMode mode{};    // of a combine or its backward
  bool splits = false;   // of an exchange, see ExchangeAttributes
};

}  // namespace jax_ep::host
