#include "cpu/silu.h"

#include <algorithm>
#include <string>
#include <vector>

#include "cpu/chunks.h"
#include "cpu/encode.h"
#include "cpu/rows.h"
#include "cpu/scales.h"

namespace jax_ep {
namespace {

template <class T>
JAX_EP_ALWAYS_INLINE void ActivateInline(const SiluCall& call, const T* __restrict x,
                                         float* __restrict out) {
  const int64_t size = call.row_size, stride = call.is_interleaved ? 2 : 1;
  const T* const up = x + (call.is_interleaved ? 1 : size);
  const Activation activation = call.activation;
  // Two loops: the compiler makes vectors of each.
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
// The same with instructions for fused multiply-adds, which not every x86-64 has.
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

// The rows of a call whose format does not quantise.
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

// The rows of a call whose format quantises.
class QuantizedRows {
 public:
  explicit QuantizedRows(const SiluCall& call)
      : call_(call), encoder_(FindEncoder(call.token_format, RowType::kFloat32)) {
    scales_.layout = call.scales_layout;
    scales_.n_scales = call.n_scales;
    scales_.scale_bytes = encoder_.scale_bytes;
    scales_.data = static_cast<uint8_t*>(call.scales);
    if (is_in_atoms()) scales_.LayOut(call.row_offsets, call.n_groups);
  }

  bool FitsCall() const {
    return encoder_.encode != nullptr && call_.n_scales * encoder_.block_size == call_.row_size;
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

  // Zeros in what is left of each group's last block of atoms.
  void Pad() const {
    if (!is_in_atoms()) return;
    for (int64_t group = 0; group < call_.n_groups; ++group) {
      const int64_t first_row = call_.row_offsets[group];
      const int64_t n_rows = call_.row_offsets[group + 1] - first_row;
      for (int64_t row = n_rows; row < BlocksOfRows(n_rows) * kAtomRows; ++row) {
        scales_.Place(group, first_row, row, call_.n_rows, /*row_scales=*/nullptr);
      }
    }
  }

 private:
  bool is_in_atoms() const { return call_.scales_layout == ScalesLayout::kAtoms; }

  void Encode(const float* values, int64_t row, uint8_t* scales) const {
    const uint32_t* const ends = call_.row_offsets + 1;
    const int64_t group = std::upper_bound(ends, ends + call_.n_groups, row) - ends;
    const int64_t first_row = call_.row_offsets[group];
    const float input_scale = call_.input_scales == nullptr ? 1.0f : call_.input_scales[group];
    const int64_t row_bytes = call_.row_size * encoder_.code_bits / 8;
    encoder_.encode(values, call_.row_size, InputScale::Make(input_scale),
                    static_cast<uint8_t*>(call_.out) + row * row_bytes, scales);
    scales_.Place(group, first_row, row - first_row, call_.n_rows, scales);
  }

  const SiluCall& call_;
  const Encoder encoder_;
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
  // More arithmetic than in other work on rows: cut as if they were longer.
  const int64_t row_bytes = 4 * call.row_size * static_cast<int64_t>(sizeof(float));
  ForTokenChunks(pool, 1, call.row_offsets[call.n_groups], row_bytes,
                 [&](int64_t, int64_t begin, int64_t end) {
                   VisitRowType(call.x_type, [&](auto type) { body(type, begin, end); });
                 });
}

}  // namespace

Status FusedSilu(const Pool& pool, const SiluCall& call) {
  const Status status = CheckOffsets(call);
  if (!status.ok()) return status;
  if (call.scales_layout == ScalesLayout::kNone) {
    ForRows(pool, call, [&](auto type, int64_t begin, int64_t end) {
      RunPlainRows<decltype(type)>(call, begin, end);
    });
    return {};
  }
  const QuantizedRows rows(call);
  if (!rows.FitsCall()) return InvalidArgument("fused_silu: no such token format");
  ForRows(pool, call,
          [&](auto type, int64_t begin, int64_t end) { rows.Run<decltype(type)>(begin, end); });
  rows.Pad();
  return {};
}

}  // namespace jax_ep
