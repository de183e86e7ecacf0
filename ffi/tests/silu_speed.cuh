// How fast fused_silu is, beside a copy and an empty kernel: a table, and a line of JSON for each
// measurement. Caches are cold: every call has rows that no call before it had for long.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "cuda/silu.h"
#include "tests/check.h"

namespace jax_ep::p2p {

constexpr int64_t kBufferRows = 131072;
constexpr int64_t kRowSize = 2048;
constexpr int kGroups = 32;

struct SpeedFormat {
  const char* name;
  const char* layout_name;
  ScalesLayout layout;
  int64_t block_size;
  int64_t scale_bytes;
  int64_t code_bits;
};

// The formats' own layouts; and, of 4 bits, the other one.
constexpr SpeedFormat kSpeedFormats[] = {
    {"bfloat16", "none", ScalesLayout::kNone, 1, 0, 16},
    {"blockwise_fp8", "transposed", ScalesLayout::kTransposed, 128, 4, 8},
    {"mxfp8", "atoms", ScalesLayout::kAtoms, 32, 1, 8},
    {"mxfp4", "atoms", ScalesLayout::kAtoms, 32, 1, 4},
    {"nvfp4", "atoms", ScalesLayout::kAtoms, 16, 1, 4},
    {"mxfp4", "row_major", ScalesLayout::kRowMajor, 32, 1, 4},
    {"nvfp4", "row_major", ScalesLayout::kRowMajor, 16, 1, 4},
};

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

// Microseconds of one of many calls that follow each other.
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
    CHECK_EQ(cudaEventSynchronize(end), cudaSuccess);
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    if (repetition > 0) best_ms = std::min(best_ms, ms);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return best_ms * 1e3 / n_calls;
}

class Speed {
 public:
  Speed() {
    const int64_t x_bytes = kBufferRows * 2 * kRowSize * 2, out_bytes = x_bytes / 2;
    CHECK_EQ(cudaMalloc(&x_, x_bytes), cudaSuccess);
    CHECK_EQ(cudaMalloc(&out_, out_bytes), cudaSuccess);
    CHECK_EQ(cudaMalloc(&scales_, out_bytes / 16), cudaSuccess);
    CHECK_EQ(cudaMalloc(&row_offsets_, (kGroups + 1) * sizeof(uint32_t)), cudaSuccess);
    FillBFloat16<<<2048, 256>>>(reinterpret_cast<uint16_t*>(x_), x_bytes / 2);
    int device = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&n_sms_, cudaDevAttrMultiProcessorCount, device);
    empty_us_ = Measure(200, [&](int) { EmptyKernel<<<n_sms_, 256>>>(); });
    const double engine_us = MeasureCopies(Copier::kEngine, out_bytes);
    const double kernel_us = MeasureCopies(Copier::kKernel, out_bytes);
    copy_gb_per_s_ = 2.0 * out_bytes / std::min(engine_us, kernel_us) / 1e3;
    std::printf("copy: %.0f GB/s (cudaMemcpyAsync %.0f, kernel %.0f); empty kernel: %.2f us\n",
                copy_gb_per_s_, 2.0 * out_bytes / engine_us / 1e3,
                2.0 * out_bytes / kernel_us / 1e3, empty_us_);
  }

  ~Speed() {
    for (void* pointer : {static_cast<void*>(x_), static_cast<void*>(out_),
                          static_cast<void*>(scales_), static_cast<void*>(row_offsets_)}) {
      cudaFree(pointer);
    }
  }

  void Run() {
    std::printf("%-14s %-10s %7s %10s %8s %8s %10s %10s\n", "format", "scales", "rows", "us",
                "GB/s", "of copy", "excess us", "copy us");
    for (const SpeedFormat& format : kSpeedFormats) {
      for (const int64_t n_used : {1, 8, 128, 1024, 8192, 32768, 131072}) Run(format, n_used);
    }
  }

 private:
  enum class Copier { kEngine, kKernel };

  // Of one of many copies that follow each other: each of its own bytes, as many at a time.
  double MeasureCopies(Copier copier, int64_t bytes) {
    bytes = bytes / 16 * 16;
    const int64_t n_windows = kBufferRows * kRowSize * 2 / bytes;
    return Measure(bytes >= 16 << 20 ? 16 : 200, [&](int i) {
      const int64_t at = i * 97 % n_windows * bytes;
      if (copier == Copier::kEngine) {
        cudaMemcpyAsync(out_ + at, x_ + at, bytes, cudaMemcpyDeviceToDevice, nullptr);
      } else {
        CopyKernel<<<4 * n_sms_, 512>>>(reinterpret_cast<const int4*>(x_ + at),
                                        reinterpret_cast<int4*>(out_ + at), bytes / 16);
      }
    });
  }

  // Of copying that moves as many bytes.
  double CopyUs(double moved_bytes) {
    const double bytes = std::min(moved_bytes / 2, 2.0 * kBufferRows * kRowSize);
    const auto whole = static_cast<int64_t>(bytes);
    return std::min(MeasureCopies(Copier::kEngine, whole), MeasureCopies(Copier::kKernel, whole)) *
           (moved_bytes / 2 / bytes);
  }

  void Run(const SpeedFormat& format, int64_t n_used) {
    SetOffsets(n_used);
    const int64_t x_row_bytes = 2 * kRowSize * 2, out_row_bytes = kRowSize * format.code_bits / 8;
    const int64_t n_windows = kBufferRows / n_used;
    const auto launch = [&](int i) {
      SiluCall call{};
      call.token_format = format.name;
      call.scales_layout = format.layout;
      call.n_rows = kBufferRows;
      call.n_groups = kGroups;
      call.row_size = kRowSize;
      call.n_scales = format.scale_bytes == 0 ? 0 : kRowSize / format.block_size;
      call.x_type = call.out_type = RowType::kBFloat16;
      const int64_t row = i * 97 % n_windows * n_used;
      call.x = x_ + row * x_row_bytes;
      call.row_offsets = row_offsets_;
      call.out = out_ + row * out_row_bytes;
      call.scales = scales_;
      CHECK_EQ(LaunchFusedSilu(call, nullptr), cudaSuccess);
    };
    const double us = Measure(n_used >= 8192 ? 16 : 200, launch);
    const double scale_bytes =
        static_cast<double>(kRowSize) / format.block_size * format.scale_bytes;
    const double bytes = n_used * (x_row_bytes + out_row_bytes + scale_bytes);
    const double gb_per_s = bytes / us / 1e3, share = gb_per_s / copy_gb_per_s_;
    const double copy_us = CopyUs(bytes);
    const double excess_us = us - empty_us_ - bytes / copy_gb_per_s_ / 1e3;
    std::printf("%-14s %-10s %7lld %10.2f %8.0f %7.0f%% %10.2f %10.2f\n", format.name,
                format.layout_name, static_cast<long long>(n_used), us, gb_per_s, 100 * share,
                excess_us, copy_us);
    std::printf(
        "{\"benchmark\": \"fused_silu\", \"format\": \"%s\", \"scales\": \"%s\", \"rows\": %lld, "
        "\"row_size\": %lld, "
        "\"us\": %.3f, \"gb_per_s\": %.1f, \"share_of_copy\": %.4f, \"excess_us\": %.3f, "
        "\"us_of_copying_as_many_bytes\": %.3f, "
        "\"copy_gb_per_s\": %.1f, \"empty_us\": %.3f}\n",
        format.name, format.layout_name, static_cast<long long>(n_used),
        static_cast<long long>(kRowSize), us, gb_per_s, share, excess_us, copy_us, copy_gb_per_s_,
        empty_us_);
  }

  // As many rows in every group, as far as they go.
  void SetOffsets(int64_t n_used) {
    std::vector<uint32_t> offsets;
    for (int64_t i = 0; i <= kGroups; ++i) {
      offsets.push_back(static_cast<uint32_t>(n_used * i / kGroups));
    }
    cudaMemcpy(row_offsets_, offsets.data(), offsets.size() * sizeof(uint32_t),
               cudaMemcpyHostToDevice);
  }

  uint8_t* x_ = nullptr;
  uint8_t* out_ = nullptr;
  uint8_t* scales_ = nullptr;
  uint32_t* row_offsets_ = nullptr;
  int n_sms_ = 0;
  double empty_us_ = 0, copy_gb_per_s_ = 0;
};

}  // namespace jax_ep::p2p
