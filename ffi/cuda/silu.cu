// The kernels of fused_silu. A warp takes chunks of rows in use; a lane has eight neighbouring
// columns, so that the elements of a scale are a few lanes'.

#include <algorithm>
#include <type_traits>

#include "core/silu_pieces.h"
#include "cuda/device/gate_table.cuh"
#include "cuda/device/silu_groups.cuh"
#include "cuda/device/silu_input.cuh"
#include "cuda/device/silu_output.cuh"
#include "cuda/prepare.h"
#include "cuda/silu.h"

namespace jax_ep::p2p {
namespace {

// Warps of a block; a block for each multiprocessor, as each fills a table. With codes of 4 bits it
// is instructions that take the longest, and more warps pay.
template <class Output, class T>
constexpr int kSiluWarps = Output::kIsPacked && std::is_same_v<T, BFloat16> ? 28 : 24;
template <class Output, class T>
constexpr int kSiluThreads = kSiluWarps<Output, T> * kWarpSize;
constexpr int kOddThreads = 768;
// Of a row, that a warp has on their way at once.
constexpr int kChunks = 2;
constexpr int kUnitElements = kChunks * kWarpElements;
// Of dynamic shared memory; more must be asked for.
constexpr size_t kSharedBytesOfAnyKernel = (48 << 10) - GateTable::kSize * sizeof(float);

// See Pieces.
struct ThisWarp {
  __device__ uint32_t Index() const { return blockIdx.x * (blockDim.x / kWarpSize) + WarpIndex(); }
  __device__ uint32_t DealtIndex() const { return WarpIndex() * gridDim.x + blockIdx.x; }
  __device__ uint32_t NumWarps() const { return gridDim.x * (blockDim.x / kWarpSize); }
};

__device__ __forceinline__ int64_t UsedRows(const SiluCall& call) {
  return min(int64_t{call.row_offsets[call.n_groups]}, call.n_rows);
}

// The rows of a call; kIsWhole: they are a multiple of units. Called by all threads of the block.
template <class Output, class T, bool kIsInterleaved, bool kIsWhole>
__device__ __forceinline__ void RunRows(const SiluCall& call, const Groups& groups,
                                        const GateTable& table) {
  using Input = SiluInput<T, kIsInterleaved>;
  constexpr bool kHasTable = std::is_same_v<T, BFloat16>;
  uint32_t lane = LaneIndex();
  opaque(lane);
  const uint32_t row_size = static_cast<uint32_t>(call.row_size);
  const uint32_t n_units = (row_size + kUnitElements - 1) / kUnitElements;
  const uint32_t row_lanes = row_size / kLaneElements;
  const uint32_t row_vectors = 2 * row_lanes * kLaneVectors<T>;
  const uint32_t up_bytes = row_size * sizeof(T);
  const bool needs_groups = Output::kQuantises && NeedsGroups(call);

  Input inputs[kChunks];
  const auto find = [&](const Piece& piece, int i) {
    // Lanes beyond the row's end load its last columns.
    const uint32_t column = (piece.chunk + i) * kWarpSize + lane;
    const uint32_t clipped = kIsWhole ? column : min(column, row_lanes - 1);
    return Vector(call.x, piece.row * row_vectors + clipped * Input::kColumnVectors);
  };
  const uint8_t* from = nullptr;  // this lane's gates in the first chunk of the next piece
  const auto load = [&](const Piece& piece, int i) {
    constexpr uint32_t kWarpVectors = kWarpSize * Input::kColumnVectors;
    inputs[i].Load(kIsWhole ? Vector(from, i * kWarpVectors) : find(piece, i), up_bytes);
  };

  griddepcontrol_wait();  // no operand is read before
  const uint32_t n_used = UsedRows(call);
  const bool rises = !needs_groups || groups.Load(call);
  Pieces<kChunks, ThisWarp> pieces(n_used, n_units);
  Piece next = pieces.piece();
  from = find(next, 0);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (i < next.n_chunks) load(next, i);
  }
  // While the first rows are on their way. Scales of groups that do not follow each other would be
  // written anywhere: then nothing is.
  if (needs_groups && !__syncthreads_and(rises)) return;
  const bool numbers = needs_groups && WarpIndex() == 0;
  if (numbers) groups.NumberBlocks(call);
  if (kHasTable && !numbers) table.Fill(call.activation, needs_groups ? kWarpSize : 0);
  __syncthreads();
  GroupCursor cursor(call, groups);
  Output output(call, lane);
  const uint64_t step_bytes = uint64_t{pieces.step()} * row_vectors * kVectorBytes;
  while (next.n_chunks > 0) {
    const Piece piece = next;
    const bool is_in_step = pieces.Next();
    next = pieces.piece();
    from = is_in_step ? from + step_bytes : find(next, 0);
    SiluRow row{piece.row, 0, 0, false, {1.0f, 1.0f}};
    if (needs_groups) cursor.Find(row);
    output.Begin(row, piece.chunk);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      if (i >= piece.n_chunks) break;  // the whole warp
      float of_gates[kLaneElements], ups[kLaneElements];
      inputs[i].Find(call.activation, table, of_gates, ups);
      Complete(ups);
      // The next piece's are on their way while this one is worked on.
      if (i < next.n_chunks) load(next, i);
      const uint32_t first = (piece.chunk + i) * kWarpElements;
      if (!kIsWhole && first >= row_size) continue;  // the same
      float values[kLaneElements];
      Activate(call.activation, of_gates, ups, values);
      const bool has_column = kIsWhole || first + lane * kLaneElements < row_size;
      output.template Store<kIsWhole>(i, has_column, values);
    }
    output.End(row, piece);
  }
}

template <class Output, class T, bool kIsInterleaved>
__device__ __forceinline__ void RunRows(const SiluCall& call, const Groups& groups,
                                        const GateTable& table) {
  if (call.row_size % kUnitElements == 0) {
    RunRows<Output, T, kIsInterleaved, true>(call, groups, table);
  } else {
    RunRows<Output, T, kIsInterleaved, false>(call, groups, table);
  }
}

template <class Output, class T>
__global__ void __launch_bounds__(kSiluThreads<Output, T>, 1)
    SiluKernel(const __grid_constant__ SiluCall call) {
  extern __shared__ __align__(sizeof(InputScale)) uint8_t tables[];
  const Groups groups(tables, call.n_groups);
  constexpr bool kHasTable = std::is_same_v<T, BFloat16>;
  // Of two gates at a time: see GateTable::Find.
  __shared__ __align__(8) float entries[kHasTable ? GateTable::kSize : 1];
  const GateTable table(entries);
  if (call.is_interleaved) {
    RunRows<Output, T, true>(call, groups, table);
  } else {
    RunRows<Output, T, false>(call, groups, table);
  }
}

// Rows that are no multiple of 16 bytes, in a plain format: an element per thread.
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

// Without a function, if there is none.
template <class T>
Kernel FindKernel(const SiluCall& call, bool is_odd) {
  if (call.scales_layout == ScalesLayout::kNone) {
    return is_odd ? Kernel{OddRowsKernel<T>, kOddThreads} : kKernel<PlainOutput, T>;
  }
  if (is_odd) return {};
  if (call.token_format == "blockwise_fp8") return kKernel<QuantisedOutput<BlockwiseFp8>, T>;
  if (call.token_format == "mxfp8") return kKernel<QuantisedOutput<MxFp8>, T>;
  if (call.token_format == "mxfp4") return kKernel<QuantisedOutput<MxFp4>, T>;
  if (call.token_format == "nvfp4") return kKernel<QuantisedOutput<NvFp4>, T>;
  return {};
}

Kernel FindKernel(const SiluCall& call, bool is_odd) {
  if (call.x_type == RowType::kBFloat16) return FindKernel<BFloat16>(call, is_odd);
  if (call.x_type == RowType::kFloat16) return FindKernel<Float16>(call, is_odd);
  return FindKernel<float>(call, is_odd);
}

bool IsOdd(const SiluCall& call) {
  const auto bits = reinterpret_cast<uintptr_t>(call.x) | reinterpret_cast<uintptr_t>(call.out);
  return call.row_size % kLaneElements != 0 || bits % kVectorBytes != 0;
}

// Whether 32 bits count the vectors of x, of which a lane's values are the widest, the bytes of a
// row's gates, and the scales, in blocks of atoms where they are.
bool IsCountable(const SiluCall& call) {
  const int64_t n_vectors = call.n_rows * call.row_size / 2;
  const int64_t gate_bytes = call.row_size * int64_t{sizeof(float)};
  const int64_t n_scales =
      call.scales_layout == ScalesLayout::kAtoms
          ? MaxBlocks(call.n_rows, call.n_groups) * AtomsPerRow(call.n_scales) * kAtomBytes
          : call.n_rows * call.n_scales;
  return std::max({n_vectors, gate_bytes, n_scales}) <= UINT32_MAX;
}

// The kernel is brought to the device before what precedes it in the stream has ended, and waits
// for that itself: a launch takes as long as 5 MB. What is compiled for older devices does not
// wait.
cudaError_t Launch(const Kernel& kernel, const SiluCall& call, int n_blocks, size_t shared_bytes,
                   cudaStream_t stream) {
  constexpr int kFirstThatWaits = 90;  // as __CUDA_ARCH__ / 10
  cudaFuncAttributes code;
  cudaError_t error = cudaFuncGetAttributes(&code, kernel.function);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(n_blocks));
  config.blockDim = dim3(kernel.n_threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = code.ptxVersion >= kFirstThatWaits ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel.function, call);
}

// Blocks that are on the device at once; fewer where there is less to do.
int NumBlocks(const SiluCall& call, const Kernel& kernel, int n_sms) {
  const int64_t n_units = call.n_rows * ((call.row_size + kUnitElements - 1) / kUnitElements);
  const int n_warps = kernel.n_threads / kWarpSize;
  const int64_t n_needed = (n_units + n_warps - 1) / n_warps;
  return static_cast<int>(std::clamp<int64_t>(n_needed, 1, n_sms));
}

cudaError_t FindAndLaunch(const SiluCall& call, cudaStream_t stream) {
  const Kernel kernel = FindKernel(call, IsOdd(call));
  const bool needs_groups = NeedsGroups(call);
  if (kernel.function == nullptr || !IsCountable(call) ||
      (needs_groups && call.n_groups > kMostSiluGroups)) {
    return cudaErrorInvalidValue;
  }
  int device = 0, n_sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  const size_t shared_bytes = needs_groups ? Groups::Bytes(call.n_groups) : 0;
  if (shared_bytes > kSharedBytesOfAnyKernel) {
    // As much as any call: what another thread asks for is not less.
    error = cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(Groups::Bytes(kMostSiluGroups)));
    if (error != cudaSuccess) return error;
  }
  return Launch(kernel, call, NumBlocks(call, kernel, n_sms), shared_bytes, stream);
}

}  // namespace

cudaError_t PrepareFusedSilu() {
  int n_blocks = 1;
  SiluCall call{};
  for (const RowType type : {RowType::kBFloat16, RowType::kFloat16, RowType::kFloat32}) {
    call.x_type = type;
    for (const char* format : {"", "odd", "blockwise_fp8", "mxfp8", "mxfp4", "nvfp4"}) {
      call.token_format = format;
      const bool is_plain = call.token_format.empty() || call.token_format == "odd";
      call.scales_layout = is_plain ? ScalesLayout::kNone : ScalesLayout::kRowMajor;
      const Kernel kernel = FindKernel(call, call.token_format == "odd");
      const cudaError_t error = PrepareKernel(reinterpret_cast<const void*>(kernel.function),
                                              kernel.n_threads, 0, &n_blocks);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

cudaError_t LaunchFusedSilu(const SiluCall& call, cudaStream_t stream) {
  if (call.n_rows == 0 || call.row_size == 0) return cudaSuccess;
  const cudaError_t error = FindAndLaunch(call, stream);
  if (error != cudaSuccess) cudaGetLastError();  // said here, it is not the next launch's
  return error;
}

}  // namespace jax_ep::p2p
