// The kernel of copies.h. Each block lists what other ranks have for the result; all blocks then
// take parts of these entries in turn.

#include "p2p/copies/copies.h"
#include "p2p/device/copy.cuh"
#include "p2p/device/reduce.cuh"
#include "p2p/launch/launch.h"

namespace jax_ep::p2p {
namespace {

constexpr int kThreads = 512;

// The entries of `out` for which another rank has one, in shared memory.
struct Lists {
  const uint8_t** sources;  // [n, R]: the entry of each rank; null: none
  uint8_t** outs;           // [n]
  int size;

  __device__ const uint8_t* Source(int i, const CopiesArgs& args, int rank) const {
    return sources[i * args.n_ranks + rank];
  }
};

// Called by a block.
__device__ Lists MakeLists(const CopiesArgs& args) {
  extern __shared__ uint8_t* smem[];
  __shared__ int size;
  const Lists lists{const_cast<const uint8_t**>(smem), smem + args.n * args.n_ranks, 0};
  if (WarpIndex() == 0) {
    int32_t n_listed = 0;
    for (int64_t first = 0; first < args.n; first += kWarpSize) {
      const int64_t i = first + LaneIndex();
      const auto source = [&](int rank) -> const uint8_t* {
        const int64_t entry = args.entries[rank * args.n + i];
        const bool has_one = rank != args.rank && entry >= 0 && entry < args.n_from;
        return has_one ? args.arrays[rank] + entry * args.entry_bytes : nullptr;
      };
      bool is_listed = false;
      for (int rank = 0; i < args.n && rank < args.n_ranks; ++rank) {
        is_listed |= source(rank) != nullptr;
      }
      const int at = ExclusiveScan(is_listed, &n_listed);
      if (!is_listed) continue;
      lists.outs[at] = args.out + i * args.entry_bytes;
      for (int rank = 0; rank < args.n_ranks; ++rank) {
        lists.sources[at * args.n_ranks + rank] = source(rank);
      }
    }
    if (LaneIndex() == 0) size = n_listed;
  }
  __syncthreads();
  return {lists.sources, lists.outs, size};
}

// Calls work(i, first) for the vectors first, first + kThreads, ..., as many as kUnroll, of each
// listed entry i, with all threads of the grid.
template <int kUnroll, class Work>
__device__ void ForEachPart(const Lists& lists, int64_t n_vectors, const Work& work) {
  constexpr int64_t kPart = int64_t{kThreads} * kUnroll;
  const int64_t n_parts = (n_vectors + kPart - 1) / kPart;
  for (int64_t part = blockIdx.x; part < lists.size * n_parts; part += gridDim.x) {
    work(static_cast<int>(part / n_parts), part % n_parts * kPart + threadIdx.x);
  }
}

template <int kUnroll>
__device__ void Load(const uint8_t* entry, int64_t first, int64_t n_vectors,
                     int4 (&data)[kUnroll]) {
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t vector = first + u * kThreads;
    data[u] = {};
    if (entry != nullptr && vector < n_vectors) {
      data[u] = ld_global_no_allocate(Vector(entry, vector));
    }
  }
}

template <int kUnroll>
__device__ void Store(uint8_t* entry, int64_t first, int64_t n_vectors,
                      const int4 (&data)[kUnroll]) {
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t vector = first + u * kThreads;
    if (vector < n_vectors) st_global(Vector(entry, vector), data[u]);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) AddCopies(const CopiesArgs args) {
  constexpr int kUnroll = 2;
  const Lists lists = MakeLists(args);
  const int64_t n_vectors = args.entry_bytes / kVectorBytes;
  ForEachPart<kUnroll>(lists, n_vectors, [&](int i, int64_t first) {
    const auto load = [&](int rank, int4(&data)[kUnroll]) {
      const uint8_t* const own = lists.outs[i];
      Load(rank == args.rank ? own : lists.Source(i, args, rank), first, n_vectors, data);
    };
    float sums[kUnroll][Elements<T>::kSize];
    int4 data[kUnroll], next[kUnroll];
    load(0, data);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) Unpack(data[u], sums[u], T{});
    if (args.n_ranks > 1) load(1, data);
    for (int rank = 1; rank < args.n_ranks; ++rank) {
      if (rank + 1 < args.n_ranks) load(rank + 1, next);  // in flight while one is added
      AddVectors<T, false>(data, 1.0f, sums);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) data[u] = next[u];
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) data[u] = Pack(sums[u], T{});
    Store(lists.outs[i], first, n_vectors, data);
  });
}

cudaError_t Launch(void (*kernel)(CopiesArgs), const CopiesArgs& args, cudaStream_t stream) {
  constexpr int kBlocksPerSm = 2;
  int n_sms = 0;
  const cudaError_t error = CountSms(&n_sms);
  if (error != cudaSuccess) return error;
  const size_t smem_bytes = args.n * (args.n_ranks + 1) * sizeof(void*);
  return LaunchKernel(kernel, {dim3(kBlocksPerSm * n_sms), kThreads, smem_bytes, stream}, args);
}

}  // namespace

cudaError_t LoadCopies() {
  cudaError_t error = cudaSuccess;
  for (const auto kernel : {AddCopies<BFloat16>, AddCopies<Float16>, AddCopies<float>}) {
    cudaFuncAttributes attributes;
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
  }
  return error;
}

cudaError_t LaunchAddCopies(const CopiesArgs& args, RowType type, cudaStream_t stream) {
  switch (type) {
    case RowType::kBFloat16:
      return Launch(AddCopies<BFloat16>, args, stream);
    case RowType::kFloat16:
      return Launch(AddCopies<Float16>, args, stream);
    case RowType::kFloat32:
      return Launch(AddCopies<float>, args, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace jax_ep::p2p
