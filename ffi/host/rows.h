// Arithmetic on rows, in float32. Products and sums are rounded separately, so that every transport
// gives the same bits: the build disables contraction to fused multiply-adds.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "core/element_types.h"
#include "core/float_types.h"

namespace jax_ep::host {

template <class T>
void AddRow(float* __restrict sum, const T* __restrict row, int64_t size) {
  for (int64_t i = 0; i < size; ++i) sum[i] += ToFloat(row[i]);
}

template <class T>
void AddProduct(float* __restrict sum, float weight, const T* __restrict row, int64_t size) {
  for (int64_t i = 0; i < size; ++i) sum[i] += weight * ToFloat(row[i]);
}

// float(T(value)), but for the payload of a NaN.
template <class T>
float Rounded(float value) {
  return ToFloat(FromFloat<T>(value));
}

// Without a 16-bit number in between: SSE2 is slow at narrowing.
template <>
inline float Rounded<BFloat16>(float value) {
  const uint32_t bits = FloatBits(value);
  const uint32_t if_nan = value != value ? ~0u : 0u;
  return FloatFromBits((RoundUpperHalf(bits) & 0xffff0000) | if_nan);
}

// sum += float(T(weight * row))
template <class T>
void AddRoundedProduct(float* __restrict sum, float weight, const T* __restrict row, int64_t size) {
  for (int64_t i = 0; i < size; ++i) sum[i] += Rounded<T>(weight * ToFloat(row[i]));
}

// sum += float(T(part)), then part = 0.
template <class T>
void AddRounded(float* __restrict sum, float* __restrict part, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    sum[i] += Rounded<T>(part[i]);
    part[i] = 0.0f;
  }
}

template <class T>
void StoreRow(T* __restrict row, const float* __restrict sum, int64_t size) {
  for (int64_t i = 0; i < size; ++i) row[i] = FromFloat<T>(sum[i]);
}

// row = T(row + other)
template <class T>
void AddToRow(T* __restrict row, const T* __restrict other, int64_t size) {
  for (int64_t i = 0; i < size; ++i) row[i] = FromFloat<T>(ToFloat(row[i]) + ToFloat(other[i]));
}

// row = T(weight * other)
template <class T>
void ScaleRow(T* __restrict row, float weight, const T* __restrict other, int64_t size) {
  for (int64_t i = 0; i < size; ++i) row[i] = FromFloat<T>(weight * ToFloat(other[i]));
}

// The sum of products, in an order that depends only on the size.
template <class T>
float DotRows(const T* __restrict a, const T* __restrict b, int64_t size) {
  constexpr int64_t kLanes = 16;
  std::array<float, kLanes> sums{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      sums[lane] += ToFloat(a[i + lane]) * ToFloat(b[i + lane]);
    }
  }
  for (int64_t lane = 0; i < size; ++i, ++lane) sums[lane] += ToFloat(a[i]) * ToFloat(b[i]);
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
  }
  return sums[0];
}

}  // namespace jax_ep::host
