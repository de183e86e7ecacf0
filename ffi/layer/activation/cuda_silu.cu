// The kernels of fused_silu, and their launch. A warp takes chunks of the rows in use, and loads
// the next tile while it computes and stores one; a lane has eight neighboring columns, so that few
// lanes share a scale.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/formats.h"
#include "layer/activation/cuda_silu.h"
#include "layer/activation/silu_input.cuh"
#include "layer/activation/silu_output.cuh"
#include "layer/activation/silu_tiles.h"
#include "p2p/launch/launch.h"

namespace jax_ep::silu {

using p2p::griddepcontrol_wait;
using p2p::kLaneElements;
using p2p::kWarpElements;
using p2p::kWarpSize;
using p2p::LaneIndex;
using p2p::opaque;
using p2p::Vector;
using p2p::WarpIndex;

// Chunks of a tile: what a warp has in flight at once. A chunk is kWarpElements columns.
constexpr int kTileChunks = 2;
constexpr int kTileElements = kTileChunks * kWarpElements;

// This warp's position for TileScheduler.
struct ThisWarp {
  __device__ uint32_t Index() const { return blockIdx.x * (blockDim.x / kWarpSize) + WarpIndex(); }
  __device__ uint32_t DealIndex() const { return WarpIndex() * gridDim.x + blockIdx.x; }
  __device__ uint32_t NumWarps() const { return gridDim.x * (blockDim.x / kWarpSize); }
};

__device__ __forceinline__ int64_t UsedRows(const SiluCall& call) {
  return min(int64_t{call.row_offsets[call.n_groups]}, call.n_rows);
}

// A lane's inputs of one tile. kIsWhole: rows are a multiple of tiles.
template <class T, bool kIsInterleaved, bool kIsWhole>
class TileInput {
 public:
  using Input = SiluInput<T, kIsInterleaved>;

  __device__ __forceinline__ TileInput(const SiluCall& call, uint32_t lane)
      : call_(call),
        lane_(lane),
        row_lanes_(static_cast<uint32_t>(call.row_size) / kLaneElements),
        row_vectors_(2 * row_lanes_ * kLaneVectors<T>),
        up_bytes_(static_cast<uint32_t>(call.row_size) * sizeof(T)) {}

  // Moves to a tile, or to the same columns `n_rows` further down. Load() is then of that tile.
  __device__ __forceinline__ void MoveTo(const Tile& tile) { from_ = Locate(tile, 0); }
  __device__ __forceinline__ void MoveDown(uint32_t n_rows) {
    from_ += uint64_t{n_rows} * row_vectors_ * kVectorBytes;
  }

  // Starts to load chunk `i` of `tile`, which this has moved to.
  __device__ __forceinline__ void Load(const Tile& tile, int i) {
    constexpr uint32_t kWarpVectors = kWarpSize * Input::kColumnVectors;
    inputs_[i].Load(kIsWhole ? Vector(from_, i * kWarpVectors) : Locate(tile, i), up_bytes_);
  }

  // Chunk `i` as last loaded.
  __device__ __forceinline__ const Input& operator[](int i) const { return inputs_[i]; }

 private:
  // This lane's gates in chunk `i` of a tile. Lanes beyond the row's end take its last columns.
  __device__ __forceinline__ const uint8_t* Locate(const Tile& tile, int i) const {
    const uint32_t column = (tile.chunk + i) * kWarpSize + lane_;
    const uint32_t clipped = kIsWhole ? column : min(column, row_lanes_ - 1);
    return Vector(call_.x, tile.row * row_vectors_ + clipped * Input::kColumnVectors);
  }

  const SiluCall& call_;
  const uint32_t lane_;
  const uint32_t row_lanes_;    // lanes that a row fills
  const uint32_t row_vectors_;  // of x
  const uint32_t up_bytes_;     // from gates to their ups
  const uint8_t* from_ = nullptr;
  Input inputs_[kTileChunks];
};

// Loads the group table if groups matter, and the gate table. Returns false, for all threads, if
// row_offsets do not rise from 0: the scales of such groups could be written anywhere. Follows
// GroupTable::Load. Called by all threads of the block.
template <bool kHasTable>
__device__ __forceinline__ bool FillTables(const SiluCall& call, const GroupTable& groups,
                                           const GateTable& table, bool needs_groups) {
  if (needs_groups) __syncthreads();
  const bool numbers = needs_groups && WarpIndex() == 0;
  const bool rises = !numbers || groups.NumberBlocks(call);
  if (kHasTable && !numbers) table.Fill(call.activation, needs_groups ? kWarpSize : 0);
  return __syncthreads_and(rises);
}

// Computes and stores chunk `i` of `tile`, and starts to load the same chunk of `next`, if it has
// one.
template <bool kIsWhole, class Input, class Output>
__device__ __forceinline__ void RunChunk(const SiluCall& call, const GateTable& table,
                                         uint32_t lane, const Tile& tile, const Tile& next, int i,
                                         Input& input, Output& output) {
  const uint32_t row_size = static_cast<uint32_t>(call.row_size);
  float of_gates[kLaneElements], ups[kLaneElements];
  input[i].Compute(call.activation, table, of_gates, ups);
  Complete(ups);
  if (i < next.n_chunks) input.Load(next, i);
  const uint32_t first = (tile.chunk + i) * kWarpElements;
  if (!kIsWhole && first >= row_size) return;  // the whole warp
  float values[kLaneElements];
  Activate(call.activation, of_gates, ups, values);
  const bool has_column = kIsWhole || first + lane * kLaneElements < row_size;
  output.template Store<kIsWhole>(i, has_column, values);
}

// All rows of a call. Called by all threads of the block.
template <class Output, class T, bool kIsInterleaved, bool kIsWhole>
__device__ __forceinline__ void RunRows(const SiluCall& call, const GroupTable& groups,
                                        const GateTable& table) {
  constexpr bool kHasTable = std::is_same_v<T, BFloat16>;
  uint32_t lane = LaneIndex();
  opaque(lane);
  const uint32_t row_tiles =
      (static_cast<uint32_t>(call.row_size) + kTileElements - 1) / kTileElements;
  const bool needs_groups = Output::kQuantizes && NeedsGroups(call);
  TileInput<T, kIsInterleaved, kIsWhole> input(call, lane);

  griddepcontrol_wait();  // no operand is read before
  const uint32_t n_used = UsedRows(call);
  if (needs_groups) groups.Load(call);
  TileScheduler<kTileChunks, ThisWarp> scheduler(n_used, row_tiles);
  Tile next = scheduler.tile();
  input.MoveTo(next);
#pragma unroll
  for (int i = 0; i < kTileChunks; ++i) {
    if (i < next.n_chunks) input.Load(next, i);
  }
  // The first rows are in flight meanwhile.
  if (!FillTables<kHasTable>(call, groups, table, needs_groups)) return;
  // The groups end earlier if row_offsets have changed between the two reads.
  if (needs_groups && groups.starts[call.n_groups] < n_used) return;
  GroupCursor cursor(call, groups);
  Output output(call, lane);
  while (next.n_chunks > 0) {
    const Tile tile = next;
    const bool has_same_columns = scheduler.Next();
    next = scheduler.tile();
    if (has_same_columns) {
      input.MoveDown(scheduler.step());
    } else {
      input.MoveTo(next);
    }
    SiluRow row{tile.row, 0, 0, false, {1.0f, 1.0f}};
    if (needs_groups) cursor.Find(row);
    output.Begin(row, tile.chunk);
#pragma unroll
    for (int i = 0; i < kTileChunks; ++i) {
      if (i >= tile.n_chunks) break;  // the whole warp
      RunChunk<kIsWhole>(call, table, lane, tile, next, i, input, output);
    }
    output.End(row, tile);
  }
}

namespace {

using p2p::CountSms;
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
