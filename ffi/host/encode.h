// Tokens to codes and scales on the host, by the arithmetic of core/quantize.h.
#pragma once

#include <cstdint>

#include "core/formats.h"
#include "core/quantize.h"

namespace jax_ep::host {

// Writes the codes and, one after the other, the scales of a token [hidden_size].
using Encoder = void (*)(const void* token, int64_t hidden_size, InputScale input_scale,
                         uint8_t* codes, uint8_t* scales);

// The encoder of tokens of this type, or null: plain formats have none, and none takes float16.
Encoder FindEncoder(const TokenFormat& format, RowType token_type);
// That of tokens that are encoded already, as core/message.h says, or null.
Encoder FindSplitter(const TokenFormat& format);

}  // namespace jax_ep::host
