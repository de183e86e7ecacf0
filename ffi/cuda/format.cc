#include "cuda/format.h"

namespace jax_ep::p2p {
namespace {

Encoding ToEncoding(std::string_view name) {
  if (name == "blockwise_fp8") return Encoding::kBlockwiseFp8;
  if (name == "mxfp8") return Encoding::kMxFp8;
  if (name == "mxfp4") return Encoding::kMxFp4;
  if (name == "nvfp4") return Encoding::kNvFp4;
  return Encoding::kAsItIs;
}

}  // namespace

std::optional<TokenFormat> ReadFormat(xla::ffi::Dictionary ep) {
  const auto name = ep.get<std::string_view>("token_format");
  const auto layout = ep.get<std::string_view>("scales_layout");
  const auto payload_bytes = ep.get<int64_t>("payload_bytes");
  const auto n_scales = ep.get<int64_t>("n_scales");
  const auto row_alignment = ep.get<int64_t>("row_alignment");
  if (!name.has_value() || !layout.has_value() || !payload_bytes.has_value() ||
      !n_scales.has_value() || !row_alignment.has_value()) {
    return std::nullopt;
  }
  TokenFormat format;
  format.encoding = ToEncoding(*name);
  format.layout = ToScalesLayout(*layout);
  format.payload_bytes = *payload_bytes;
  format.n_scales = *n_scales;
  format.row_alignment = *row_alignment;
  // A format with scales that is not known here must not travel as it is.
  const bool is_encoded = format.encoding != Encoding::kAsItIs;
  if (is_encoded != (format.n_scales > 0)) return std::nullopt;
  if (is_encoded) format.scale_bytes = format.encoding == Encoding::kBlockwiseFp8 ? 4 : 1;
  return format;
}

}  // namespace jax_ep::p2p
