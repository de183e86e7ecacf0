#include "layer/activation/cpu_silu.h"

#include <algorithm>
#include <string>
#include <vector>

#include "core/routing.h"
#include "host/encode.h"
#include "host/rows.h"

namespace jax_ep::silu {
namespace {

using host::Encoder;
using host::FindEncoder;
using host::ForTokenChunks;
using host::Pool;
using host::Scales;
using host::StoreRow;

template <class T>
JAX_EP_ALWAYS_INLINE void ActivateInline(const SiluCall& call, const T* __restrict x,
                                         float* __restrict out) {
  const int64_t size = call.row_size, stride = call.is_interleaved ? 2 : 1;
  const T* const up = x + (call.is_interleaved ? 1 : size);
  const Activation activation = call.activation;
  // Two loops without a branch inside, so that the compiler vectorizes each.
  if (activation.is_clamped) {
    for (int64_t i = 0; i < size; ++i) {
      const Activation clamped{true, activation.alpha, activation.limit};
      out[i] = clamped.Apply(ToFloat(x[i * stride]), ToFloat(up[i * stride]));
    }
  } else {
    for (int64_t i = 0; i < size; ++i) {
      out[i] = Activation{}.Apply(ToFloat(x[i * stride]), ToFloat(up[i * stride]));
    }
  }
}

template <class T>
void Activate(const SiluCall& call, const T* x, float* out) {
  ActivateInline(call, x, out);
}

#if defined(__x86_64__)
// Activates rows on processors with fused multiply-add, which not every x86-64 has.
template <class T>
__attribute__((target("avx2,fma"))) void ActivateWithFma(const SiluCall& call, const T* x,
                                                         float* out) {
  ActivateInline(call, x, out);
}

const bool kHasFma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");

template <class T>
void ActivateRow(const SiluCall& call, const T* x, float* out) {
  kHasFma ? ActivateWithFma(call, x, out) : Activate(call, x, out);
}
#else
template <class T>
void ActivateRow(const SiluCall& call, const T* x, float* out) {
  Activate(call, x, out);
}
#endif

// Rows in a plain format.
template <class T>
void RunPlainRows(const SiluCall& call, int64_t begin, int64_t end) {
  std::vector<float> values(call.row_size);
  for (int64_t row = begin; row < end; ++row) {
    ActivateRow(call, static_cast<const T*>(call.x) + row * 2 * call.row_size, values.data());
    VisitRowType(call.out_type, [&](auto type) {
      using Out = decltype(type);
      StoreRow(static_cast<Out*>(call.out) + row * call.row_size, values.data(), call.row_size);
    });
  }
}

// Rows in a format that quantizes.
class QuantizedRows {
 public:
  QuantizedRows(const SiluCall& call, const TokenFormat& format)
      : call_(call),
        encoder_(FindEncoder(format, RowType::kFloat32)),
        row_bytes_(format.payload_bytes(call.row_size)),
        scales_(call.scales_layout, call.n_scales, format.scale_bytes(),
                static_cast<uint8_t*>(call.scales)) {
    if (is_in_atoms()) scales_.LayOut(call.row_offsets, call.n_groups);
  }

  template <class T>
  void Run(int64_t begin, int64_t end) const {
    std::vector<float> values(call_.row_size);
    std::vector<uint8_t> scales(scales_.row_bytes());
    for (int64_t row = begin; row < end; ++row) {
      ActivateRow(call_, static_cast<const T*>(call_.x) + row * 2 * call_.row_size, values.data());
      Encode(values.data(), row, scales.data());
    }
  }

  // Zeroes the unused rest of each group's last block of atoms.
  void Pad() const {
    if (!is_in_atoms()) return;
    for (int64_t group = 0; group < call_.n_groups; ++group) {
      const int64_t first_row = call_.row_offsets[group];
      const int64_t n_rows = call_.row_offsets[group + 1] - first_row;
      scales_.Clear(group, first_row, n_rows, BlocksOfRows(n_rows) * kAtomRows, call_.n_rows);
    }
  }

 private:
  bool is_in_atoms() const { return call_.scales_layout == ScalesLayout::kAtoms; }

  void Encode(const float* values, int64_t row, uint8_t* scales) const {
    const uint32_t* const ends = call_.row_offsets + 1;
    const int64_t group = std::upper_bound(ends, ends + call_.n_groups, row) - ends;
    const int64_t first_row = call_.row_offsets[group];
    const float input_scale = call_.input_scales == nullptr ? 1.0f : call_.input_scales[group];
    encoder_(values, call_.row_size, InputScale::Make(input_scale),
             static_cast<uint8_t*>(call_.out) + row * row_bytes_, scales);
    scales_.Place(group, first_row, row - first_row, call_.n_rows, scales);
  }

  const SiluCall& call_;
  const Encoder encoder_;
  const int64_t row_bytes_;
  Scales scales_;
};

Status CheckOffsets(const SiluCall& call) {
  const uint32_t* const offsets = call.row_offsets;
  const uint32_t first = offsets[0], last = offsets[call.n_groups];
  const bool is_sorted = std::is_sorted(offsets, offsets + call.n_groups + 1);
  if (is_sorted && first == 0 && last <= call.n_rows) return {};
  return InvalidArgument("fused_silu: row_offsets must rise from 0 to at most the " +
                         std::to_string(call.n_rows) + " rows of x; got " + std::to_string(first) +
                         " to " + std::to_string(last));
}

template <class Body>
void ForRows(const Pool& pool, const SiluCall& call, const Body& body) {
  // An activation takes more arithmetic than other work on rows: chunked as if rows were longer.
  const int64_t row_bytes = 4 * call.row_size * static_cast<int64_t>(sizeof(float));
  ForTokenChunks(pool, 1, call.row_offsets[call.n_groups], row_bytes,
                 [&](int64_t, int64_t begin, int64_t end) {
                   VisitRowType(call.x_type, [&](auto type) { body(type, begin, end); });
                 });
}

}  // namespace

Status FusedSilu(const Pool& pool, const SiluCall& given) {
  const std::vector<uint32_t> row_offsets = ReadOnce(given.row_offsets, given.n_groups + 1);
  SiluCall call = given;
  call.row_offsets = row_offsets.data();
  const Status status = CheckOffsets(call);
  if (!status.ok()) return status;
  if (call.scales_layout == ScalesLayout::kNone) {
    ForRows(pool, call, [&](auto type, int64_t begin, int64_t end) {
      RunPlainRows<decltype(type)>(call, begin, end);
    });
    return {};
  }
  const TokenFormat* const format = FindTokenFormat(call.token_format);
  if (format == nullptr || format->is_plain()) {
    return InvalidArgument("fused_silu: token_format must be one that quantizes; got " +
                           std::string(call.token_format));
  }
  const QuantizedRows rows(call, *format);
  ForRows(pool, call,
          [&](auto type, int64_t begin, int64_t end) { rows.Run<decltype(type)>(begin, end); });
  rows.Pad();
  return {};
}

}  // namespace jax_ep::silu
