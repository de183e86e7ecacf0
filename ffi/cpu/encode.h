// Tokens into codes and scales on the host, by the arithmetic of core/quantize.h.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/combine_mode.h"
#include "core/quantize.h"

namespace jax_ep {

// One format for tokens of one type; null `encode`: there is no such format.
struct Encoder {
  // Writes the codes and, one after the other, the scales of a token [hidden_size].
  void (*encode)(const void* token, int64_t hidden_size, InputScale input_scale, uint8_t* codes,
                 uint8_t* scales) = nullptr;
  bool takes_input_scale = false;
  int64_t block_size = 0;  // elements per scale
  int64_t scale_bytes = 0;
  int64_t code_bits = 0;  // of an element
};

Encoder FindEncoder(std::string_view token_format, RowType token_type);

}  // namespace jax_ep
