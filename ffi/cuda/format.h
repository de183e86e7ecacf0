// The token format of a call, from its attributes.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "core/message.h"
#include "cuda/dispatch.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep::p2p {

struct TokenFormat {
  Encoding encoding = Encoding::kAsItIs;
  ScalesLayout layout = ScalesLayout::kNone;
  int64_t payload_bytes = 0;  // of a row
  int64_t n_scales = 0;       // of a token
  int64_t scale_bytes = 0;
  int64_t row_alignment = 1;
};

// Null: the attributes are those of another version.
std::optional<TokenFormat> ReadFormat(xla::ffi::Dictionary ep);

// Bytes in units of kVectorBytes, rounded up.
constexpr int32_t ToVectors(int64_t bytes) {
  return static_cast<int32_t>((bytes + kVectorBytes - 1) / kVectorBytes);
}

}  // namespace jax_ep::p2p
