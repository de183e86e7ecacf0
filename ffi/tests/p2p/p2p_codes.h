// What dispatch must send and place with a format that quantizes, by the host's encoder.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "core/formats.h"
#include "host/encode.h"
#include "tests/p2p/p2p_reference.h"

namespace jax_ep::p2p {

// A format that quantizes, mostly in its default layout.
inline RowFormat PickFormat(std::mt19937& random) {
  std::vector<const TokenFormat*> formats;
  for (const TokenFormat& format : kTokenFormats) {
    if (!format.is_plain()) formats.push_back(&format);
  }
  const TokenFormat* const format = formats[random() % formats.size()];
  return {format, random() % 3 == 0 ? ScalesLayout::kRowMajor : format->layouts[0]};
}

// Numbers of all magnitudes; now and then a NaN or an infinity, which makes its block dead.
template <class T>
std::vector<T> TokensOfAllMagnitudes(size_t n, std::mt19937& random) {
  std::vector<T> values(n);
  for (size_t i = 0; i < n; ++i) {
    const int exponent = i % 64 == 0 ? static_cast<int>(random() % 260) - 140 : 0;
    const float mantissa = static_cast<float>(static_cast<int32_t>(random())) * 0x1p-29f;
    values[i] = FromFloat<T>(std::ldexp(mantissa, exponent));
    if (random() % 5000 == 0) values[i] = FromFloat<T>(random() % 2 ? NAN : INFINITY);
  }
  return values;
}

class CodesReference {
 public:
  // Keeps a reference to the routing. `tokens`: [R][T * H]
  template <class T>
  CodesReference(const RowFormat& format, RowType type, const Routing& routing,
                 const std::vector<std::vector<T>>& tokens, float input_scale)
      : format_(format), routing_(routing) {
    const host::Encoder encode = host::FindEncoder(*format.format, type);
    const size_t hidden = routing.sizes.hidden;
    for (int rank = 0; rank < routing.sizes.n_ranks; ++rank) {
      const size_t n_tokens = routing.n_tokens(rank);
      std::vector<uint8_t>& codes = codes_.emplace_back(n_tokens * code_bytes());
      std::vector<uint8_t>& scales = scales_.emplace_back(n_tokens * scale_bytes());
      for (size_t token = 0; token < n_tokens; ++token) {
        encode(&tokens[rank][token * hidden], hidden, InputScale::Make(input_scale),
               &codes[token * code_bytes()], &scales[token * scale_bytes()]);
      }
    }
  }

  // Bytes of a row.
  size_t code_bytes() const { return format_.format->payload_bytes(routing_.sizes.hidden); }
  size_t scale_bytes() const {
    return format_.format->n_scales(routing_.sizes.hidden) * format_.format->scale_bytes();
  }
  const uint8_t* CodesOf(const RowOrigin& from) const {
    return &codes_[from.source][from.token * code_bytes()];
  }

  // Counts wrong bytes of the scales that a rank has. Those of padding must be zero, and what is
  // defined by no row must still be poisoned.
  int CountBadScales(int rank, const std::vector<uint8_t>& got) const {
    std::vector<uint8_t> expected(got.size()),
        marks(got.size());  // a mark: a scale was placed here
    PlaceScales(rank, expected, marks);
    // If an atom holds a scale, all its bytes are defined.
    const size_t piece = format_.scales_layout == ScalesLayout::kAtoms ? kAtomBytes : 1;
    int n_bad = 0;
    for (size_t at = 0; at < got.size(); at += piece) {
      const auto begin = marks.begin() + at;
      const bool is_defined = std::count(begin, begin + piece, 0) < static_cast<int64_t>(piece);
      for (size_t i = at; i < at + piece; ++i) n_bad += got[i] != (is_defined ? expected[i] : 0xff);
    }
    return n_bad;
  }

 private:
  host::Scales PlacerOf(std::vector<uint8_t>& data, int rank) const {
    host::Scales placer;
    placer.layout = format_.scales_layout;
    placer.n_scales = format_.format->n_scales(routing_.sizes.hidden);
    placer.scale_bytes = format_.format->scale_bytes();
    placer.data = data.data();
    placer.LayOut(routing_.row_offsets[rank].data(), routing_.sizes.n_local_groups());
    return placer;
  }

  void PlaceScales(int rank, std::vector<uint8_t>& scales, std::vector<uint8_t>& marks) const {
    const host::Scales placer = PlacerOf(scales, rank), marker = PlacerOf(marks, rank);
    const std::vector<uint8_t> ones(scale_bytes(), 1);
    const std::vector<uint32_t>& offsets = routing_.row_offsets[rank];
    const int n_rows = routing_.sizes.max_recv_tokens;
    for (int group = 0; group < routing_.sizes.n_local_groups(); ++group) {
      const uint32_t first = offsets[group];
      for (uint32_t row = first; row < offsets[group + 1]; ++row) {
        const RowOrigin& from = routing_.rows[rank][row];
        marker.Place(group, first, row - first, n_rows, ones.data());
        if (from.is_padding()) continue;
        placer.Place(group, first, row - first, n_rows,
                     &scales_[from.source][from.token * scale_bytes()]);
      }
    }
  }

  const RowFormat format_;
  const Routing& routing_;
  std::vector<std::vector<uint8_t>> codes_, scales_;  // [R][T * bytes]
};

}  // namespace jax_ep::p2p
