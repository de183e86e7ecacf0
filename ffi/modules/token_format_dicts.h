// The table of token formats -> dicts, so that Python can compare its classes with it.
#pragma once

#include <nanobind/nanobind.h>

#include "core/formats.h"

namespace jax_ep {

inline nanobind::str ToStr(std::string_view text) {
  return nanobind::str(text.data(), text.size());
}

inline nanobind::dict ToDict(const TokenFormat& format) {
  nanobind::list layouts;
  nanobind::dict row_alignment;  // where it is not 1
  for (const ScalesLayout layout : format.layouts) {
    if (layout == ScalesLayout::kNone) continue;
    layouts.append(ToStr(Name(layout)));
    const int64_t n_rows = format.row_alignment(layout);
    if (n_rows != 1) row_alignment[ToStr(Name(layout))] = n_rows;
  }
  nanobind::dict dict;
  dict["name"] = ToStr(format.name);
  dict["block_size"] = format.block_size;
  dict["element"] = ToStr(Name(format.element));
  dict["element_bits"] = format.element_bits();
  dict["packed"] = format.is_packed;
  dict["scale_type"] = nanobind::none();
  if (!format.is_plain()) dict["scale_type"] = ToStr(Name(format.scale_type));
  dict["scale_bytes"] = format.scale_bytes();
  dict["takes_input_scale"] = format.takes_input_scale;
  dict["scales_layouts"] = layouts;
  dict["row_alignment"] = row_alignment;
  return dict;
}

// A dict per format.
inline nanobind::list TokenFormatDicts() {
  nanobind::list dicts;
  for (const TokenFormat& format : kTokenFormats) dicts.append(ToDict(format));
  return dicts;
}

}  // namespace jax_ep
