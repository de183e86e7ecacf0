// Checks of the kernel that quantizes rows along rows and along columns, against the host's
// arithmetic, bit by bit.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/quantize.h"
#include "layer/matmul/fp8_gradient.h"
#include "tests/unit/matmul_case.cuh"

namespace jax_ep::matmul {

constexpr int64_t kBlock = kMatmulScaleBlock;
constexpr uint8_t kNanCode = 0x7f;

template <class T>
void CopyIn(const Buffer& to, const std::vector<T>& from) {
  CHECK_EQ(to.size(), from.size() * sizeof(T));
  ExpectSuccess("cudaMemcpy", cudaMemcpy(to.As<void>(), from.data(), to.size(), cudaMemcpyDefault));
}

template <class T>
std::vector<T> CopyOut(const Buffer& from) {
  std::vector<T> to(from.size() / sizeof(T));
  ExpectSuccess("cudaMemcpy",
                cudaMemcpy(to.data(), from.As<void>(), from.size(), cudaMemcpyDefault));
  return to;
}

template <class T>
std::unique_ptr<Buffer> OnDevice(const std::vector<T>& from) {
  auto buffer = std::make_unique<Buffer>(from.size() * sizeof(T));
  CopyIn(*buffer, from);
  return buffer;
}

inline void ExpectSame(const std::string& what, const void* got, const void* wanted, size_t size) {
  const auto* const a = static_cast<const uint8_t*>(got);
  const auto* const b = static_cast<const uint8_t*>(wanted);
  const auto n = std::count_if(a, a + size, [&](const uint8_t& x) { return x != b[&x - a]; });
  const auto at = std::mismatch(a, a + size, b).first - a;
  CHECK_EQ(what + ": " + std::to_string(n) + " bytes differ, the first at " + std::to_string(at),
           what + ": 0 bytes differ, the first at " + std::to_string(size));
}

// A block of at most 128 rows of a group.
struct RowBlock {
  int64_t group, first, end;
};

inline std::vector<RowBlock> BlocksOf(const Shape& shape) {
  std::vector<RowBlock> blocks;
  for (int64_t group = 0; group < shape.n_groups(); ++group) {
    const auto clamped = [&](int64_t i) {
      return std::min<int64_t>(shape.row_offsets[i], shape.n_rows);
    };
    for (int64_t row = clamped(group); row < clamped(group + 1); row += kBlock) {
      blocks.push_back({group, row, std::min(row + kBlock, clamped(group + 1))});
    }
  }
  return blocks;
}

// Encodes elements that share a scale, by the definitions of core/quantize.h.
inline float EncodeBlock(const float* values, int64_t size, uint8_t* codes) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < size; ++i) largest = std::max(largest, MagnitudeBits(values[i]));
  const bool is_dead = largest >= kFloatInfinity;
  const float amax = is_dead ? 0.0f : Bounded<BlockwiseFp8>(FloatFromBits(largest));
  const float scale = std::max(amax, kMinGradientAmax) / 448.0f;
  for (int64_t i = 0; i < size; ++i) {
    codes[i] = ToE4m3(is_dead ? 0.0f : Bounded<BlockwiseFp8>(values[i]) / scale);
  }
  return scale;
}

// Rows of bfloat16, or codes with scales, and what LaunchQuantizeRows makes of them.
class QuantizeCase {
 public:
  QuantizeCase(const Shape& shape, bool are_codes, uint32_t seed)
      : shape_(shape), are_codes_(are_codes), blocks_(BlocksOf(shape)) {
    Draw(seed);
    call_.n_rows = shape.n_rows, call_.n_groups = shape.n_groups(), call_.n = shape.n;
    row_offsets_ = OnDevice(shape.row_offsets);
    call_.row_offsets = row_offsets_->As<uint32_t>();
    rows_ = are_codes ? OnDevice(codes_) : OnDevice(halves_);
    call_.rows = rows_->As<void>();
    if (!are_codes) return;
    row_scales_ = OnDevice(scales_);
    call_.scales = row_scales_->As<float>();
  }

  void Run(bool along_rows, bool along_columns) {
    const std::string name = std::string("quantize ") + (are_codes_ ? "codes" : "numbers") +
                             (along_rows ? " along rows" : "") +
                             (along_columns ? " along columns" : "") + ", " + shape_.name + ", C " +
                             std::to_string(shape_.n_rows) + ", n " + std::to_string(shape_.n);
    const int64_t n = shape_.n, n_rows = shape_.n_rows;
    const int64_t n_blocks = MaxRowBlocks(n_rows, shape_.n_groups());
    const Buffer row_codes(n_rows * n), row_scales(n_rows * n / kBlock * sizeof(float));
    const Buffer column_codes(n * n_blocks * kBlock), column_scales(n_blocks * n * sizeof(float));
    call_.along_rows = call_.along_columns = {};
    if (along_rows) call_.along_rows = {row_codes.As<uint8_t>(), row_scales.As<float>()};
    if (along_columns) {
      call_.along_columns = {column_codes.As<uint8_t>(), column_scales.As<float>()};
    }
    ExpectSuccess(name, hopper::LaunchQuantizeRows(call_, nullptr));
    ExpectSuccess(name, cudaDeviceSynchronize());
    for (const Buffer* buffer : {&row_codes, &row_scales, &column_codes, &column_scales}) {
      ExpectSameBytes(name + ": past the end", buffer->guard(), nullptr, kGuardBytes);
    }
    CheckRows(name, row_codes, row_scales, along_rows);
    CheckColumns(name, column_codes, column_scales, along_columns);
  }

 private:
  float Number(int64_t row, int64_t column) const {
    const int64_t i = row * shape_.n + column;
    if (!are_codes_) return ToFloat(BFloat16{halves_[i]});
    const uint8_t code = codes_[i];
    if ((code & 0x7f) == kNanCode) return NAN;
    const float magnitude = FromE4m3(code & 0x7f);
    return (code & 0x80 ? -magnitude : magnitude) * scales_[column / kBlock * shape_.n_rows + row];
  }

  // Columns of all magnitudes, a few numbers that are not finite, and NaN in rows of no group.
  void Draw(uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const int64_t n = shape_.n, n_rows = shape_.n_rows;
    std::vector<float> factors(n);
    for (float& factor : factors) {
      const int kind = random() % 8;
      factor =
          kind == 0 ? 0.0f : std::ldexp(1.0f, kind == 1 ? -static_cast<int>(random() % 149) : 0);
      if (kind == 2) factor = 0x1p125f;
      if (kind > 4) factor = std::exp(6 * normal(random));
    }
    halves_.resize(are_codes_ ? 0 : n_rows * n), codes_.resize(are_codes_ ? n_rows * n : 0);
    scales_.resize(are_codes_ ? n_rows * n / kBlock : 0);
    for (float& scale : scales_) scale = std::ldexp(1.0f + (random() % 64) / 64.0f, -12);
    for (int64_t row = 0; row < n_rows; ++row) {
      const bool is_used = row >= shape_.row_offsets[0] && row < shape_.n_used();
      for (int64_t column = 0; column < n; ++column) {
        const int64_t i = row * n + column;
        const bool is_rare = random() % 5000 == 0;
        if (are_codes_) {
          codes_[i] = random() % 256;
          const bool is_nan = (codes_[i] & 0x7f) == kNanCode;
          codes_[i] = !is_used ? kNanCode : is_nan && !is_rare ? 0 : codes_[i];
        } else {
          float value = normal(random) * factors[column];
          if (is_rare) value = random() % 2 == 0 ? INFINITY : NAN;
          halves_[i] = FromFloat<BFloat16>(is_used ? value : NAN).bits;
        }
      }
    }
  }

  void CheckRows(const std::string& name, const Buffer& codes, const Buffer& scales, bool is_made) {
    const int64_t n = shape_.n, n_rows = shape_.n_rows;
    std::vector<uint8_t> wanted(n_rows * n, kCanary);
    std::vector<uint32_t> wanted_scales(n_rows * n / kBlock, 0x01010101u * kCanary);
    std::vector<float> block(kBlock);
    for (const RowBlock& rows : blocks_) {
      if (!is_made) break;
      for (int64_t row = rows.first; row < rows.end; ++row) {
        for (int64_t column = 0; column < n; column += kBlock) {
          for (int64_t i = 0; i < kBlock; ++i) block[i] = Number(row, column + i);
          const float scale = EncodeBlock(block.data(), kBlock, &wanted[row * n + column]);
          wanted_scales[column / kBlock * n_rows + row] = FloatBits(scale);
        }
      }
    }
    ExpectSame(name + ": codes of rows", CopyOut<uint8_t>(codes).data(), wanted.data(),
               codes.size());
    ExpectSame(name + ": scales of rows", CopyOut<float>(scales).data(), wanted_scales.data(),
               scales.size());
  }

  void CheckColumns(const std::string& name, const Buffer& codes, const Buffer& scales,
                    bool is_made) {
    const int64_t n = shape_.n, line = MaxRowBlocks(shape_.n_rows, shape_.n_groups()) * kBlock;
    std::vector<uint8_t> wanted(n * line, kCanary);
    std::vector<uint32_t> wanted_scales(line / kBlock * n, 0x01010101u * kCanary);
    std::vector<float> block(kBlock);
    for (size_t b = 0; is_made && b < blocks_.size(); ++b) {
      for (int64_t column = 0; column < n; ++column) {
        std::fill(block.begin(), block.end(), 0.0f);
        for (int64_t row = blocks_[b].first; row < blocks_[b].end; ++row) {
          block[row - blocks_[b].first] = Number(row, column);
        }
        const float scale = EncodeBlock(block.data(), kBlock, &wanted[column * line + b * kBlock]);
        wanted_scales[b * n + column] = FloatBits(scale);
      }
    }
    ExpectSame(name + ": codes of columns", CopyOut<uint8_t>(codes).data(), wanted.data(),
               codes.size());
    ExpectSame(name + ": scales of columns", CopyOut<float>(scales).data(), wanted_scales.data(),
               scales.size());
  }

  const Shape shape_;
  const bool are_codes_;
  const std::vector<RowBlock> blocks_;
  std::vector<uint16_t> halves_;
  std::vector<uint8_t> codes_;
  std::vector<float> scales_;
  QuantizeCall call_{};
  std::unique_ptr<Buffer> row_offsets_, rows_, row_scales_;
};

// Returns the number of cases.
inline int CheckQuantize(Shape shape, uint32_t seed) {
  const bool is_large = shape.n_rows * shape.n > 1 << 22;  // the host would take long
  shape.n = is_large ? 3 * kBlock : (shape.n + kBlock - 1) / kBlock * kBlock;
  if (shape.n_rows == 0 || shape.n == 0) return 0;
  QuantizeCase numbers(shape, /*are_codes=*/false, seed);
  numbers.Run(true, true), numbers.Run(true, false), numbers.Run(false, true);
  QuantizeCase(shape, /*are_codes=*/true, seed).Run(false, true);
  return 4;
}

}  // namespace jax_ep::matmul
