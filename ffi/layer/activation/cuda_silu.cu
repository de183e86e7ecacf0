// The kernels of fused_silu, and their launch. A warp takes chunks of the rows in use; a lane has
// eight neighboring columns, so that few lanes share a scale.

#include <algorithm>
#include <type_traits>

#include "core/formats.h"
#include "layer/activation/cuda_silu.h"
#include "layer/activation/gate_table.cuh"
#include "layer/activation/silu_groups.cuh"
#include "layer/activation/silu_output.cuh"
#include "layer/activation/silu_rows.cuh"
#include "p2p/launch/launch.h"

namespace jax_ep::silu {
namespace {

using p2p::CountSms;
using p2p::griddepcontrol_wait;
using p2p::kLaneElements;
using p2p::kWarpSize;
using p2p::LaunchKernel;
using p2p::LaunchShape;
using p2p::LoadKernel;
using p2p::PackPair;

// Warps of a block. There is one block per SM, since each fills a table. Formats of 4 bits are
// limited by instructions, so more warps pay.
template <class Output, class T>
constexpr int kSiluWarps = Output::kIsPacked && std::is_same_v<T, BFloat16> ? 28 : 24;
template <class Output, class T>
constexpr int kSiluThreads = kSiluWarps<Output, T> * kWarpSize;
constexpr int kOddThreads = 768;
// Dynamic shared memory that any kernel may use without asking for more.
constexpr size_t kDefaultSmemBytes = (48 << 10) - GateTable::kSize * sizeof(float);

template <class Output, class T, bool kIsInterleaved>
__device__ __forceinline__ void RunRows(const SiluCall& call, const GroupTable& groups,
                                        const GateTable& table) {
  if (call.row_size % kTileElements == 0) {
    RunRows<Output, T, kIsInterleaved, true>(call, groups, table);
  } else {
    RunRows<Output, T, kIsInterleaved, false>(call, groups, table);
  }
}

template <class Output, class T>
__global__ void __launch_bounds__(kSiluThreads<Output, T>, 1)
    SiluKernel(const __grid_constant__ SiluCall call) {
  extern __shared__ __align__(sizeof(InputScale)) uint8_t tables[];
  const GroupTable groups(tables, call.n_groups);
  constexpr bool kHasTable = std::is_same_v<T, BFloat16>;
  // Aligned for the entries of a magnitude, of both signs; see GateTable.
  __shared__ __align__(8) float entries[kHasTable ? GateTable::kSize : 1];
  const GateTable table(entries);
  if (call.is_interleaved) {
    RunRows<Output, T, true>(call, groups, table);
  } else {
    RunRows<Output, T, false>(call, groups, table);
  }
}

// Rows that are not a multiple of 16 bytes, in a plain format: one element per thread.
template <class T>
__global__ void __launch_bounds__(kOddThreads)
    OddRowsKernel(const __grid_constant__ SiluCall call) {
  griddepcontrol_wait();
  const int64_t size = call.row_size, stride = call.is_interleaved ? 2 : 1;
  const int64_t end = UsedRows(call) * size;
  for (int64_t i = int64_t{blockIdx.x} * kOddThreads + threadIdx.x; i < end;
       i += int64_t{gridDim.x} * kOddThreads) {
    const int64_t row = i / size, column = i % size;
    const T* const gate = static_cast<const T*>(call.x) + row * 2 * size + column * stride;
    const T* const up = gate + (call.is_interleaved ? 1 : size);
    const float value = call.activation.Apply(ToFloat(*gate), ToFloat(*up));
    if (call.out_type == RowType::kFloat32) {
      static_cast<float*>(call.out)[i] = value;
    } else {
      const bool is_bfloat16 = call.out_type == RowType::kBFloat16;
      const uint32_t pair =
          is_bfloat16 ? PackPair(value, 0.0f, BFloat16{}) : PackPair(value, 0.0f, Float16{});
      static_cast<uint16_t*>(call.out)[i] = static_cast<uint16_t>(pair);
    }
  }
}

struct Kernel {
  void (*function)(SiluCall);
  int n_threads;
};

template <class Output, class T>
constexpr Kernel kKernel = {SiluKernel<Output, T>, kSiluThreads<Output, T>};

// A null function if there is no such kernel.
template <class T>
Kernel FindKernel(const SiluCall& call, bool is_odd) {
  if (call.scales_layout == ScalesLayout::kNone) {
    return is_odd ? Kernel{OddRowsKernel<T>, kOddThreads} : kKernel<PlainOutput, T>;
  }
  const TokenFormat* const format = FindTokenFormat(call.token_format);
  if (is_odd || format == nullptr || format->is_plain()) return {};
  return VisitFormat(format->encoding, [](auto quantized) -> Kernel {
    return kKernel<QuantizedOutput<decltype(quantized)>, T>;
  });
}

Kernel FindKernel(const SiluCall& call, bool is_odd) {
  return VisitRowType(call.x_type, [&](auto t) { return FindKernel<decltype(t)>(call, is_odd); });
}

bool IsOdd(const SiluCall& call) {
  const auto bits = reinterpret_cast<uintptr_t>(call.x) | reinterpret_cast<uintptr_t>(call.out);
  return call.row_size % kLaneElements != 0 || bits % kVectorBytes != 0;
}

// Whether the kernels can count in 32 bits: the vectors of x, the bytes of a row's gates, and the
// scales, including the padding of blocks of atoms.
bool FitsInt32(const SiluCall& call) {
  const int64_t n_vectors = call.n_rows * call.row_size / 2;
  const int64_t gate_bytes = call.row_size * int64_t{sizeof(float)};
  const int64_t n_scales =
      call.scales_layout == ScalesLayout::kAtoms
          ? MaxBlocks(call.n_rows, call.n_groups) * AtomsPerRow(call.n_scales) * kAtomBytes
          : call.n_rows * call.n_scales;
  return std::max({n_vectors, gate_bytes, n_scales}) <= UINT32_MAX;
}

// Launches the kernel before the work that precedes it in the stream has ended; the kernel itself
// waits for that. A launch takes as long as moving 5 MB. Code for older devices does not wait, and
// is launched normally.
cudaError_t Launch(const Kernel& kernel, const SiluCall& call, int n_blocks, size_t smem_bytes,
                   cudaStream_t stream) {
  constexpr int kFirstArchThatWaits = 90;  // __CUDA_ARCH__ / 10
  cudaFuncAttributes code;
  const cudaError_t error = cudaFuncGetAttributes(&code, kernel.function);
  if (error != cudaSuccess) return error;
  LaunchShape shape{dim3(n_blocks), kernel.n_threads, smem_bytes, stream};
  shape.starts_early = code.ptxVersion >= kFirstArchThatWaits;
  return LaunchKernel(kernel.function, shape, call);
}

// As many blocks as are resident at once; fewer if there is less to do.
int NumBlocks(const SiluCall& call, const Kernel& kernel, int n_sms) {
  const int64_t n_tiles = call.n_rows * ((call.row_size + kTileElements - 1) / kTileElements);
  const int n_warps = kernel.n_threads / kWarpSize;
  const int64_t n_needed = (n_tiles + n_warps - 1) / n_warps;
  return static_cast<int>(std::clamp<int64_t>(n_needed, 1, n_sms));
}

cudaError_t FindAndLaunch(const SiluCall& call, cudaStream_t stream) {
  const Kernel kernel = FindKernel(call, IsOdd(call));
  const bool needs_groups = NeedsGroups(call);
  if (kernel.function == nullptr || !FitsInt32(call) ||
      (needs_groups && call.n_groups > kMaxSiluGroups)) {
    return cudaErrorInvalidValue;
  }
  int n_sms = 0;
  cudaError_t error = CountSms(&n_sms);
  if (error != cudaSuccess) return error;
  const size_t smem_bytes = needs_groups ? GroupTable::Bytes(call.n_groups) : 0;
  if (smem_bytes > kDefaultSmemBytes) {
    // As much as any call needs, so that no other thread sets a lower limit meanwhile.
    error = cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(GroupTable::Bytes(kMaxSiluGroups)));
    if (error != cudaSuccess) return error;
  }
  return Launch(kernel, call, NumBlocks(call, kernel, n_sms), smem_bytes, stream);
}

}  // namespace

cudaError_t LoadSiluKernels() {
  int n_blocks = 1;
  SiluCall call{};
  const auto load = [&](bool is_odd) {
    const Kernel kernel = FindKernel(call, is_odd);
    return LoadKernel(reinterpret_cast<const void*>(kernel.function), kernel.n_threads, 0,
                      &n_blocks);
  };
  for (const RowType type : kRowTypes) {
    call.x_type = type;
    for (const TokenFormat& format : kTokenFormats) {
      call.token_format = format.name;
      call.scales_layout = format.layouts[0];
      cudaError_t error = load(/*is_odd=*/false);
      if (error == cudaSuccess && format.is_plain()) error = load(/*is_odd=*/true);
      if (error != cudaSuccess) return error;
    }
  }
  return LoadSiluGradientKernels();
}

cudaError_t LaunchFusedSilu(const SiluCall& call, cudaStream_t stream) {
  if (call.n_rows == 0 || call.row_size == 0) return cudaSuccess;
  const cudaError_t error = FindAndLaunch(call, stream);
  if (error != cudaSuccess) cudaGetLastError();  // clears it: the next launch must not report it
  return error;
}

}  // namespace jax_ep::silu
