#include "xla/attributes.h"

#include <optional>
#include <string>

namespace jax_ep {

Status FindRowFormat(std::string_view token_format, std::string_view scales_layout,
                     RowFormat* row_format) {
  const TokenFormat* const format = FindTokenFormat(token_format);
  if (format == nullptr) {
    return InvalidArgument("token_format must be a format that the extension knows; got " +
                           std::string(token_format) +
                           ". Was the extension built from other sources?");
  }
  const std::optional<ScalesLayout> layout = FindScalesLayout(scales_layout);
  if (!layout.has_value() || !format->Has(*layout)) {
    return InvalidArgument("scales_layout must be one that " + std::string(format->name) +
                           " has; got " + std::string(scales_layout) +
                           ". Was the extension built from other sources?");
  }
  *row_format = {format, *layout};
  return {};
}

}  // namespace jax_ep
