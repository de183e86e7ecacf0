// Benchmark of fused_silu next to a copy and an empty kernel: prints a line of JSON for each
// measurement. Caches are cold: each call reads rows that no recent call has read.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "core/formats.h"
#include "layer/activation/cuda_silu.h"
#include "tests/p2p/p2p_memory.h"

namespace jax_ep::silu {

using p2p::DeviceArray;
using p2p::OnDevice;

static __global__ void FillBFloat16(uint16_t* values, int64_t size) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t hash = static_cast<uint32_t>(i) * 2654435761u;
    hash ^= hash >> 15;
    // Both signs, magnitudes 0.5 to 8.
    values[i] = static_cast<uint16_t>((hash & 0x8000) | (0x3f00 + (hash >> 16) % 0x200));
  }
}

static __global__ void CopyKernel(const int4* from, int4* to, int64_t size) {
  constexpr int kUnroll = 4;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < size;
       i += kUnroll * stride) {
    int4 data[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      if (i + k * stride < size) data[k] = __ldcs(from + i + k * stride);
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      if (i + k * stride < size) __stcs(to + i + k * stride, data[k]);
    }
  }
}

static __global__ void EmptyKernel() {}

// Returns microseconds per call of n_calls calls in a row: the best of 3 repetitions.
template <class Launch>
double Measure(int n_calls, const Launch& launch) {
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  float best_ms = 1e30f;
  for (int repetition = 0; repetition < 4; ++repetition) {  // the first warms up
    cudaEventRecord(begin);
    for (int i = 0; i < n_calls; ++i) launch(i);
    cudaEventRecord(end);
    CHECK_CUDA(cudaEventSynchronize(end));
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    if (repetition > 0) best_ms = std::min(best_ms, ms);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return best_ms * 1e3 / n_calls;
}

class SiluBench {
 public:
  SiluBench()
      : x_(kBufferRows * kRowSize * 4),
        out_(x_.size() / 2),
        scales_(out_.size() / 16),
        row_offsets_(kGroups + 1) {
    FillBFloat16<<<2048, 256>>>(reinterpret_cast<uint16_t*>(x_.get()), x_.size() / 2);
    int device = 0;
    CHECK_CUDA(cudaGetDevice(&device));
    CHECK_CUDA(cudaDeviceGetAttribute(&n_sms_, cudaDevAttrMultiProcessorCount, device));
    empty_us_ = Measure(200, [&](int) { EmptyKernel<<<n_sms_, 256>>>(); });
    copy_gb_per_s_ = 2.0 * out_.size() / CopyUs(2.0 * out_.size()) / 1e3;
  }

  void Run() {
    RunFormat({FindTokenFormat("plain_bfloat16"), ScalesLayout::kNone});
    for (const TokenFormat& format : kTokenFormats) {
      if (!format.is_plain()) RunFormat({&format, format.layouts[0]});
      if (format.element_bits() == 4) RunFormat({&format, ScalesLayout::kRowMajor});
    }
  }

 private:
  static constexpr int64_t kBufferRows = 131072;
  static constexpr int64_t kRowSize = 2048;
  static constexpr int kGroups = 32;

  enum class Copier { kEngine, kKernel };

  struct Result {
    double us;
    double bytes;  // read and written
    double copy_us;
  };

  // Microseconds per copy, of many consecutive copies of different bytes.
  double MeasureCopies(Copier copier, int64_t bytes) {
    bytes = bytes / 16 * 16;
    const int64_t n_windows = out_.size() / bytes;
    return Measure(bytes >= 16 << 20 ? 16 : 200, [&](int i) {
      const int64_t at = i * 97 % n_windows * bytes;
      uint8_t *const from = x_.get() + at, *const to = out_.get() + at;
      if (copier == Copier::kEngine) {
        cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, nullptr);
      } else {
        CopyKernel<<<4 * n_sms_, 512>>>(reinterpret_cast<const int4*>(from),
                                        reinterpret_cast<int4*>(to), bytes / 16);
      }
    });
  }

  // Microseconds of a copy that moves as many bytes, the faster way.
  double CopyUs(double moved_bytes) {
    const double bytes = std::min<double>(moved_bytes / 2, out_.size());
    const auto whole = static_cast<int64_t>(bytes);
    return std::min(MeasureCopies(Copier::kEngine, whole), MeasureCopies(Copier::kKernel, whole)) *
           (moved_bytes / 2 / bytes);
  }

  void RunFormat(const RowFormat& format) {
    for (const int64_t n_used : {1, 8, 128, 1024, 8192, 32768, 131072}) {
      SetOffsets(n_used);
      Print(format, n_used, Run(*format.format, format.scales_layout, n_used));
    }
  }

  Result Run(const TokenFormat& format, ScalesLayout layout, int64_t n_used) {
    const int64_t x_row_bytes = 2 * kRowSize * 2, out_row_bytes = format.payload_bytes(kRowSize);
    const int64_t n_windows = kBufferRows / n_used;
    SiluCall call{};
    call.token_format = format.name;
    call.scales_layout = layout;
    call.n_rows = kBufferRows;
    call.n_groups = kGroups;
    call.row_size = kRowSize;
    call.n_scales = format.n_scales(kRowSize);
    call.x_type = call.out_type = RowType::kBFloat16;
    call.row_offsets = row_offsets_.get();
    call.scales = scales_.get();
    const auto launch = [&](int i) {
      const int64_t row = i * 97 % n_windows * n_used;
      call.x = x_.get() + row * x_row_bytes;
      call.out = out_.get() + row * out_row_bytes;
      CHECK_CUDA(LaunchFusedSilu(call, nullptr));
    };
    const double us = Measure(n_used >= 8192 ? 16 : 200, launch);
    const int64_t scale_bytes = call.n_scales * format.scale_bytes();
    const double bytes = static_cast<double>(n_used) * (x_row_bytes + out_row_bytes + scale_bytes);
    return {us, bytes, CopyUs(bytes)};
  }

  void Print(const RowFormat& format, int64_t n_used, const Result& result) const {
    const double gb_per_s = result.bytes / result.us / 1e3, share = gb_per_s / copy_gb_per_s_;
    const double excess_us = result.us - empty_us_ - result.bytes / copy_gb_per_s_ / 1e3;
    const char* const name = format.format->is_plain() ? "bfloat16" : format.format->name.data();
    const char* const layout = Name(format.scales_layout).data();
    std::printf(
        "{\"benchmark\": \"fused_silu\", \"format\": \"%s\", \"scales\": \"%s\", \"rows\": %lld, "
        "\"row_size\": %lld, "
        "\"us\": %.3f, \"gb_per_s\": %.1f, \"share_of_copy\": %.4f, \"excess_us\": %.3f, "
        "\"us_of_copying_as_many_bytes\": %.3f, "
        "\"copy_gb_per_s\": %.1f, \"empty_us\": %.3f}\n",
        name, layout, static_cast<long long>(n_used), static_cast<long long>(kRowSize), result.us,
        gb_per_s, share, excess_us, result.copy_us, copy_gb_per_s_, empty_us_);
  }

  // Spreads the rows over the groups as evenly as possible.
  void SetOffsets(int64_t n_used) {
    std::vector<uint32_t> offsets;
    for (int64_t i = 0; i <= kGroups; ++i) {
      offsets.push_back(static_cast<uint32_t>(n_used * i / kGroups));
    }
    row_offsets_.Write(offsets);
  }

  const DeviceArray<uint8_t> x_, out_, scales_;
  DeviceArray<uint32_t> row_offsets_;
  int n_sms_ = 0;
  double empty_us_ = 0, copy_gb_per_s_ = 0;
};

}  // namespace jax_ep::silu
