// The kernels of fused_silu. A warp takes chunks of rows in use, as many blocks as fit at once;
// a lane has eight neighbouring columns, so that the elements of a scale are a few lanes'.

#include <algorithm>

#include "cuda/device/scan.cuh"
#include "cuda/device/silu_input.cuh"
#include "cuda/device/silu_output.cuh"
#include "cuda/prepare.h"
#include "cuda/silu.h"

namespace jax_ep::p2p {
namespace {

constexpr int kSiluWarps = 8;
constexpr int kSiluThreads = kSiluWarps * kWarpSize;
constexpr int kSiluBlocksPerSm = 3;
// Of a row, that a warp has on their way at once.
constexpr int kChunks = 2;
constexpr int kUnitValues = kChunks * kChunkValues;
// More must be asked for.
constexpr size_t kSharedBytesOfAnyKernel = 48 << 10;

__device__ __forceinline__ int64_t UsedRows(const SiluCall& call) {
  return min(int64_t{call.row_offsets[call.n_groups]}, call.n_rows);
}

// Whether the group of a row matters.
__host__ __device__ inline bool NeedsGroups(const SiluCall& call) {
  return call.input_scales != nullptr || call.scales_layout == ScalesLayout::kAtoms;
}

// The first row and the first block of atoms of every group, and where the last one ends.
struct Groups {
  InputScale* input_scales;  // [L + 1], shared; where there are any
  uint32_t* starts;          // [L + 1], shared
  uint32_t* blocks;          // [L + 1], shared

  __device__ Groups(uint8_t* shared, int64_t n_groups)
      : input_scales(reinterpret_cast<InputScale*>(shared)),
        starts(reinterpret_cast<uint32_t*>(input_scales + n_groups + 1)),
        blocks(starts + n_groups + 1) {}

  __host__ __device__ static constexpr size_t Bytes(int64_t n_groups) {
    return (n_groups + 1) * (sizeof(InputScale) + 2 * sizeof(uint32_t));
  }

  // Called by all threads of the block.
  __device__ void Find(const SiluCall& call) const {
    if (WarpIndex() == 0) Fill(call);
    __syncthreads();
  }

 private:
  // Called by one warp, converged.
  __device__ void Fill(const SiluCall& call) const {
    const int n_groups = static_cast<int>(call.n_groups);
    int32_t n_blocks = 0;
    for (int first = 0; first <= n_groups; first += kWarpSize) {
      const int group = first + LaneIndex();
      const uint32_t start = group <= n_groups ? call.row_offsets[group] : 0;
      const uint32_t end = group < n_groups ? call.row_offsets[group + 1] : start;
      const int32_t block =
          ExclusiveScan(static_cast<int32_t>(BlocksOfRows(end - start)), &n_blocks);
      if (group > n_groups) continue;
      starts[group] = start;
      blocks[group] = block;
      const bool has_scale = call.input_scales != nullptr && group < n_groups;
      input_scales[group] = InputScale::Make(has_scale ? call.input_scales[group] : 1.0f);
    }
  }
};

// The group of a warp's row; rows must rise.
class GroupCursor {
 public:
  __device__ GroupCursor(const SiluCall& call, const Groups& groups)
      : call_(call), groups_(groups) {}

  __device__ void Find(SiluRow& row) {
    if (row.index >= end_) Search(row.index);
    row.in_group = row.index - start_;
    row.first_block = first_block_;
    row.input_scale = input_scale_;
  }

 private:
  // The last group that starts at or before the row; those before it end there.
  __device__ void Search(uint32_t row) {
    int low = 0, high = static_cast<int>(call_.n_groups);
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (groups_.starts[middle] <= row ? low : high) = middle;
    }
    start_ = groups_.starts[low];
    end_ = groups_.starts[low + 1];
    first_block_ = groups_.blocks[low];
    input_scale_ = groups_.input_scales[low];
  }

  const SiluCall& call_;
  const Groups& groups_;
  uint32_t start_ = 0, end_ = 0, first_block_ = 0;
  InputScale input_scale_ = {};
};

// Some columns of a row: kUnitValues of them, or a chunk of these.
struct Unit {
  uint32_t row;
  uint32_t index;

  __device__ Unit(uint32_t position, uint32_t n_units)
      : row(position / n_units), index(position % n_units) {}

  __device__ void Advance(const Unit& step, uint32_t n_units) {
    row += step.row;
    index += step.index;
    if (index < n_units) return;
    index -= n_units;
    ++row;
  }
};

// What a warp works on at once: chunks [first, end) of a unit; none where the block has no more.
struct Piece {
  Unit unit;
  int first, end;
};

// What this warp works on, piece after piece: every n-th unit, and every n-th chunk of those that
// are left when there are fewer units than warps.
class Pieces {
 public:
  __device__ Pieces(uint32_t n_rows, uint32_t n_units)
      : n_units_(n_units),
        n_warps_(gridDim.x * kSiluWarps),
        step_(n_warps_, n_units),
        n_rounds_(n_rows * n_units / n_warps_),
        n_chunks_(n_rows * n_units % n_warps_ * kChunks),
        piece_{Unit(blockIdx.x * kSiluWarps + WarpIndex(), n_units), 0, 0} {
    Cut();
  }

  __device__ const Piece& piece() const { return piece_; }

  __device__ void Next() {
    ++round_;
    piece_.unit.Advance(step_, n_units_);
    Cut();
  }

 private:
  __device__ void Cut() {
    piece_.first = 0;
    piece_.end = kChunks;
    if (round_ < n_rounds_) return;
    // Neighbours in different blocks: what is left is less than a block's share.
    const uint32_t warp = WarpIndex() * gridDim.x + blockIdx.x;
    const uint32_t chunk = (round_ - n_rounds_) * n_warps_ + warp;
    piece_.unit = Unit(n_rounds_ * n_warps_ + chunk / kChunks, n_units_);
    piece_.first = static_cast<int>(chunk % kChunks);
    piece_.end = chunk < n_chunks_ ? piece_.first + 1 : piece_.first;
  }

  const uint32_t n_units_, n_warps_;
  const Unit step_;
  const uint32_t n_rounds_, n_chunks_;
  uint32_t round_ = 0;
  Piece piece_;
};

// Zeros in what is left of each group's last block of atoms: a warp takes an atom.
__device__ void PadAtoms(const SiluCall& call, const Groups& groups) {
  const uint32_t n_atoms = static_cast<uint32_t>(AtomsPerRow(call.n_scales));
  const uint32_t n_groups = static_cast<uint32_t>(call.n_groups);
  for (uint32_t i = blockIdx.x * kSiluWarps + WarpIndex(); i < n_groups * n_atoms;
       i += gridDim.x * kSiluWarps) {
    const uint32_t group = i / n_atoms;
    const uint32_t n_in_last = (groups.starts[group + 1] - groups.starts[group]) % kAtomRows;
    if (n_in_last == 0) continue;
    const uint32_t atom = (groups.blocks[group + 1] - 1) * n_atoms + i % n_atoms;
    uint32_t* const rows = static_cast<uint32_t*>(call.scales) + atom * kAtomRows;
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      if (quarter * kWarpSize + LaneIndex() >= n_in_last) rows[LaneIndex() * 4 + quarter] = 0;
    }
  }
}

// The rows of a call; kIsWhole: they are a multiple of units. Called by all threads of the block.
template <class Output, class T, bool kIsInterleaved, bool kIsWhole>
__device__ __forceinline__ void RunRows(const SiluCall& call, const Groups& groups) {
  using Input = SiluInput<T, kIsInterleaved>;
  const uint32_t lane_column = LaneIndex() * kLaneValues;
  const uint32_t row_size = static_cast<uint32_t>(call.row_size);
  const uint32_t n_units = (row_size + kUnitValues - 1) / kUnitValues;
  const uint32_t row_lanes = row_size / kLaneValues;
  const uint32_t row_vectors = 2 * row_lanes * kLaneVectors<T>;
  const uint32_t up_bytes = row_size * sizeof(T);
  const uint32_t n_used = UsedRows(call);
  const bool needs_groups = Output::kQuantises && NeedsGroups(call);

  Input inputs[kChunks];
  const auto load = [&](const Unit& unit, int i) {
    constexpr uint32_t kChunkVectors = kWarpSize * Input::kColumnVectors;
    const uint32_t lane = unit.index * kChunks * kWarpSize + LaneIndex();
    // Lanes beyond the row's end load its last columns.
    const uint32_t clipped = kIsWhole ? lane : min(lane + i * kWarpSize, row_lanes - 1);
    const uint8_t* const gates =
        Vector(call.x, unit.row * row_vectors + clipped * Input::kColumnVectors);
    inputs[i].Load(kIsWhole ? Vector(gates, i * kChunkVectors) : gates, up_bytes);
  };

  Pieces pieces(n_used, n_units);
  Piece next = pieces.piece();
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (next.first <= i && i < next.end) load(next.unit, i);
  }
  // While the first rows are on their way.
  if (needs_groups) groups.Find(call);
  GroupCursor cursor(call, groups);
  Output output(call);
  while (next.first < next.end) {
    const Piece piece = next;
    const Unit& unit = piece.unit;
    pieces.Next();
    next = pieces.piece();
    SiluRow row{unit.row, 0, 0, {1.0f, 1.0f}};
    if (needs_groups) cursor.Find(row);
    output.Begin(row, unit.index * kChunks);
    const uint32_t first = unit.index * kUnitValues;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const bool is_here = piece.first <= i && i < piece.end;
      float gates[kLaneValues], ups[kLaneValues], values[kLaneValues];
      const bool is_near = inputs[i].IsNear();
      inputs[i].ToFloats(gates, ups);
      Complete(gates), Complete(ups);
      // The next piece's are on their way while this one is worked on.
      if (next.first <= i && i < next.end) load(next.unit, i);
      if (!is_here) continue;                                                    // the whole warp
      if (!kIsWhole && i > 0 && first + i * kChunkValues >= row_size) continue;  // the same
      Activate(call.activation, is_near, gates, ups, values);
      const bool has_column = kIsWhole || first + i * kChunkValues + lane_column < row_size;
      output.template Store<kIsWhole>(i, has_column, values);
    }
  }
}

template <class Output, class T, bool kIsInterleaved>
__device__ __forceinline__ void RunRows(const SiluCall& call, const Groups& groups) {
  if (call.row_size % kUnitValues == 0) {
    RunRows<Output, T, kIsInterleaved, true>(call, groups);
  } else {
    RunRows<Output, T, kIsInterleaved, false>(call, groups);
  }
}

template <class Output, class T>
__global__ void __launch_bounds__(kSiluThreads, kSiluBlocksPerSm)
    SiluKernel(const __grid_constant__ SiluCall call) {
  extern __shared__ __align__(sizeof(InputScale)) uint8_t tables[];
  const Groups groups(tables, call.n_groups);
  if (call.is_interleaved) {
    RunRows<Output, T, true>(call, groups);
  } else {
    RunRows<Output, T, false>(call, groups);
  }
  if (Output::kQuantises && call.scales_layout == ScalesLayout::kAtoms) PadAtoms(call, groups);
}

// Rows that are no multiple of 16 bytes, in a plain format: an element per thread.
template <class T>
__global__ void __launch_bounds__(kSiluThreads)
    OddRowsKernel(const __grid_constant__ SiluCall call) {
  const int64_t size = call.row_size, stride = call.is_interleaved ? 2 : 1;
  const int64_t end = UsedRows(call) * size;
  for (int64_t i = int64_t{blockIdx.x} * kSiluThreads + threadIdx.x; i < end;
       i += int64_t{gridDim.x} * kSiluThreads) {
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

using Kernel = void (*)(SiluCall);

template <class T>
Kernel FindKernel(const SiluCall& call, bool is_odd) {
  if (call.scales_layout == ScalesLayout::kNone) {
    return is_odd ? OddRowsKernel<T> : SiluKernel<PlainOutput, T>;
  }
  if (is_odd) return nullptr;
  if (call.token_format == "blockwise_fp8") return SiluKernel<QuantisedOutput<BlockwiseFp8>, T>;
  if (call.token_format == "mxfp8") return SiluKernel<QuantisedOutput<MxFp8>, T>;
  if (call.token_format == "mxfp4") return SiluKernel<QuantisedOutput<MxFp4>, T>;
  if (call.token_format == "nvfp4") return SiluKernel<QuantisedOutput<NvFp4>, T>;
  return nullptr;
}

Kernel FindKernel(const SiluCall& call, bool is_odd) {
  if (call.x_type == RowType::kBFloat16) return FindKernel<BFloat16>(call, is_odd);
  if (call.x_type == RowType::kFloat16) return FindKernel<Float16>(call, is_odd);
  return FindKernel<float>(call, is_odd);
}

bool IsOdd(const SiluCall& call) {
  const auto bits = reinterpret_cast<uintptr_t>(call.x) | reinterpret_cast<uintptr_t>(call.out);
  return call.row_size % kLaneValues != 0 || bits % kVectorBytes != 0;
}

// Blocks that are on the device at once; fewer where there is less to do.
int64_t NumBlocks(const SiluCall& call, int n_sms) {
  const int64_t n_units = call.n_rows * ((call.row_size + kUnitValues - 1) / kUnitValues);
  const int64_t n_needed = (n_units + kSiluWarps - 1) / kSiluWarps;
  return std::clamp<int64_t>(n_needed, 1, int64_t{n_sms} * kSiluBlocksPerSm);
}

}  // namespace

cudaError_t PrepareFusedSilu() {
  int n_blocks = kSiluBlocksPerSm;
  SiluCall call{};
  for (const RowType type : {RowType::kBFloat16, RowType::kFloat16, RowType::kFloat32}) {
    call.x_type = type;
    for (const char* format : {"", "odd", "blockwise_fp8", "mxfp8", "mxfp4", "nvfp4"}) {
      call.token_format = format;
      const bool is_plain = call.token_format.empty() || call.token_format == "odd";
      call.scales_layout = is_plain ? ScalesLayout::kNone : ScalesLayout::kRowMajor;
      const Kernel kernel = FindKernel(call, call.token_format == "odd");
      const cudaError_t error =
          PrepareKernel(reinterpret_cast<const void*>(kernel), kSiluThreads, 0, &n_blocks);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

cudaError_t LaunchFusedSilu(const SiluCall& call, cudaStream_t stream) {
  const Kernel kernel = FindKernel(call, IsOdd(call));
  const bool needs_groups = NeedsGroups(call);
  // Vectors of x, the widest there is, are counted by 32 bits.
  const bool is_countable = call.n_rows * call.row_size / 2 <= UINT32_MAX;
  if (kernel == nullptr || !is_countable || (needs_groups && call.n_groups > kMostSiluGroups)) {
    return cudaErrorInvalidValue;
  }
  int device = 0, n_sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  const size_t shared_bytes = needs_groups ? Groups::Bytes(call.n_groups) : 0;
  if (shared_bytes > kSharedBytesOfAnyKernel) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return error;
  }
  kernel<<<static_cast<unsigned>(NumBlocks(call, n_sms)), kSiluThreads, shared_bytes, stream>>>(
      call);
  return cudaGetLastError();
}

}  // namespace jax_ep::p2p
