// bfloat16 and float16 as bit patterns: conversion from and to float32, rounded to nearest even.
// Written once, so that every transport rounds alike.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/host_device.h"

namespace jax_ep {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

JAX_EP_HOST_DEVICE inline uint32_t FloatBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

JAX_EP_HOST_DEVICE inline float FloatFromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

JAX_EP_HOST_DEVICE inline float ToFloat(float value) { return value; }

JAX_EP_HOST_DEVICE inline float ToFloat(BFloat16 value) {
  return FloatFromBits(static_cast<uint32_t>(value.bits) << 16);
}

JAX_EP_HOST_DEVICE inline float ToFloat(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t magnitude = value.bits & 0x7fff;
  if (magnitude >= 0x7c00) return FloatFromBits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude >= 0x0400) return FloatFromBits(sign | ((magnitude << 13) + (112u << 23)));
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;  // exact
  return FloatFromBits(sign | FloatBits(subnormal));
}

template <class T>
T FromFloat(float value);

template <>
inline float FromFloat<float>(float value) {
  return value;
}

// The upper half of the result is the float, given by its bits, rounded to bfloat16. Not for NaN.
JAX_EP_HOST_DEVICE inline uint32_t RoundUpperHalf(uint32_t bits) {
  return bits + 0x7fff + ((bits >> 16) & 1);
}

template <>
inline BFloat16 FromFloat<BFloat16>(float value) {
  const uint32_t bits = FloatBits(value);
  const uint32_t quiet_nan = (bits >> 16) | 0x40;
  const uint32_t rounded = RoundUpperHalf(bits) >> 16;
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return {static_cast<uint16_t>(is_nan ? quiet_nan : rounded)};
}

template <>
inline Float16 FromFloat<Float16>(float value) {
  const uint32_t bits = FloatBits(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00 | ((magnitude >> 13) & 0x3ff);
  } else if (magnitude >= 0x477ff000) {  // from 65520 on: rounds to infinity
    half = 0x7c00;
  } else if (magnitude >= 0x38800000) {  // from 2^-14 on: normal
    half = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  } else {
    // Subnormal: adding 0.5 rounds the value to a multiple of 2^-24, left in the low bits.
    half = FloatBits(FloatFromBits(magnitude) + 0.5f) - 0x3f000000;
  }
  return {static_cast<uint16_t>(sign | half)};
}

}  // namespace jax_ep
