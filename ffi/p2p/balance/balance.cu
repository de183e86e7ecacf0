// The kernels of balance.h. Each block makes the whole plan in shared memory, which takes less time
// than to wait for another block's, and then places its own choices.

#include "core/routing.h"
#include "p2p/balance/balance.h"
#include "p2p/device/warp.cuh"
#include "p2p/launch/launch.h"

namespace jax_ep::p2p {
namespace {

constexpr int kThreads = kWorkerThreads;
constexpr int kWarps = kWorkerWarps;
constexpr int kSlack = 32;  // SLACK in Python

// Calls work(i) for i in [0, n). Called by a block.
template <class Work>
__device__ __forceinline__ void ForEach(int n, const Work& work) {
  for (int i = threadIdx.x; i < n; i += kThreads) work(i);
}

struct Ids {
  const int32_t* first;
  int64_t offset;
  int size;

  // The i-th of n parts, of which each but the last ones is a multiple of `unit`.
  __device__ Ids Part(int i, int n, int unit) const {
    const int part = CeilDiv(CeilDiv(size, n), unit) * unit;
    const int begin = min(i * part, size);
    return {first + begin, offset + begin, min(part, size - begin)};
  }
};

template <class Args>
__device__ Ids IdsOfBlock(const Args& args) {
  const int64_t part = (args.n + args.n_blocks - 1) / args.n_blocks;
  const int64_t begin = min(blockIdx.x * part, args.n);
  return {args.ids + begin, begin, static_cast<int>(min(part, args.n - begin))};
}

template <class Args>
__device__ __forceinline__ bool IsExpert(const Args& args, int32_t id) {
  return id >= 0 && id < args.n_experts;
}

__global__ void __launch_bounds__(kThreads) CountChoices(const CountChoicesArgs args) {
  extern __shared__ int32_t counts[];
  ForEach(args.n_experts, [&](int e) { counts[e] = 0; });
  __syncthreads();
  const Ids ids = IdsOfBlock(args);
  ForEach(ids.size, [&](int i) {
    const int32_t id = __ldg(ids.first + i);
    if (IsExpert(args, id)) red_shared_add(&counts[id], 1);
  });
  __syncthreads();
  ForEach(args.n_experts, [&](int e) {
    args.block_counts[static_cast<int64_t>(blockIdx.x) * args.n_experts + e] = counts[e];
    if (args.n_blocks == 1) {
      args.counts[e] = counts[e];
    } else if (counts[e] != 0) {
      atomicAdd(args.counts + e, counts[e]);
    }
  });
}

// A part of a node's line: of what ranks give, or of their room.
struct Piece {
  int32_t begin, end;

  __device__ bool IsEmpty() const { return begin >= end; }
  __device__ int32_t Overlap(const Piece& other) const {
    return max(min(end, other.end) - max(begin, other.begin), 0);
  }
};

struct Rank {
  int32_t load;  // choices of its experts
  Piece given;
  Piece room;
  int32_t n_before_given, n_before_room;  // experts' pieces that end before these
};

struct Expert {
  int32_t total;  // its choices
  int32_t index;  // among those of its home, the largest first
  Piece given;    // at first, what of all its home's choices it has, in that order
  int32_t own;    // choices of this rank's tokens that stay here; others go elsewhere
  int32_t start;  // position of choice i of this rank among all that go elsewhere, less i
  int32_t turn;   // its choices in earlier blocks
};

class Balancer {
 public:
  __device__ Balancer(const BalanceArgs& args, int32_t* smem)
      : args_(args),
        rank_(__ldg(args.coordinate) % args.n_ranks),
        n_local_(args.n_experts / args.n_ranks),
        per_node_(args.n_ranks_per_node * n_local_),
        ids_(IdsOfBlock(args)),
        warp_ids_(ids_.Part(WarpIndex(), kWarps, kWarpSize)),
        ends_(smem),
        turns_(ends_ + args.n_ranks * args.n_experts),
        experts_(reinterpret_cast<Expert*>(turns_ + kWarps * args.n_experts)),
        ranks_(reinterpret_cast<Rank*>(experts_ + args.n_experts)) {
    static_assert(kWarps + (sizeof(Expert) + sizeof(Rank)) / sizeof(int32_t) <= 32,
                  "what BalanceSmemBytes has for an expert, of which a rank has one or more");
  }

  // Called by a block, like the functions below.
  __device__ void Run() const {
    Clear();
    __syncthreads();
    Count();
    __syncthreads();
    OrderExperts();
    SumLoads();
    __syncthreads();
    ForEach(args_.n_ranks, [&](int rank) { LayOut(rank); });
    __syncthreads();
    ForEach(args_.n_experts, [&](int e) { LayOutExpert(e); });
    __syncthreads();
    CountPieces();
    __syncthreads();
    ForEach(args_.n_experts, [&](int e) {
      Share(e);
      StartTurns(e);
    });
    __syncthreads();
    Place();
  }

 private:
  __device__ int HomeOf(int e) const { return e / n_local_; }
  __device__ int FirstRankOf(int rank) const { return rank - rank % args_.n_ranks_per_node; }

  __device__ void Clear() const {
    ForEach(kWarps * args_.n_experts, [&](int i) { turns_[i] = 0; });
    ForEach(args_.n_experts, [&](int e) { experts_[e].turn = 0; });
    if (blockIdx.x > 0) return;
    ForEach(args_.n_ranks * args_.n_slots, [&](int i) { args_.copies[i] = -1; });
  }

  // Choices of all ranks, of earlier blocks, and of each warp.
  __device__ void Count() const {
    const int n_experts = args_.n_experts;
    ForEach(n_experts, [&](int e) {
      int32_t total = 0;
#pragma unroll 8
      for (int r = 0; r < args_.n_ranks; ++r) total += __ldg(args_.counts + r * n_experts + e);
      experts_[e].total = total;
    });
    const int n_parts = max(kThreads / n_experts, 1);
    ForEach(n_parts * n_experts, [&](int i) {
      const int e = i % n_experts;
      int32_t turn = 0;
#pragma unroll 8
      for (int block = i / n_experts; block < blockIdx.x; block += n_parts) {
        turn += __ldg(args_.block_counts + static_cast<int64_t>(block) * n_experts + e);
      }
      if (turn != 0) red_shared_add(&experts_[e].turn, turn);
    });
    for (int i = LaneIndex(); i < warp_ids_.size; i += kWarpSize) {
      const int32_t id = __ldg(warp_ids_.first + i);
      if (IsExpert(args_, id)) red_shared_add(&turns_[WarpIndex() * n_experts + id], 1);
    }
  }

  __device__ void OrderExperts() const {
    ForEach(args_.n_experts, [&](int e) {
      const int first = HomeOf(e) * n_local_;
      const int32_t total = experts_[e].total;
      int32_t index = 0, before = 0;
#pragma unroll 8
      for (int other = first; other < first + n_local_; ++other) {
        const int32_t count = experts_[other].total;
        if (count < total || (count == total && other >= e)) continue;
        ++index;
        before += count;
      }
      experts_[e].index = index;
      experts_[e].given = {before, before + total};
    });
  }

  __device__ void SumLoads() const {
    for (int rank = WarpIndex(); rank < args_.n_ranks; rank += kWarps) {
      int32_t load = 0;
      for (int i = LaneIndex(); i < n_local_; i += kWarpSize) {
        load += experts_[rank * n_local_ + i].total;
      }
      load = __reduce_add_sync(kAllLanes, load);
      if (LaneIndex() == 0) ranks_[rank].load = load;
    }
  }

  // What the rank gives, or has room for, after the ranks of its node that come before it.
  __device__ void LayOut(int rank) const {
    const int first = FirstRankOf(rank), n = args_.n_ranks_per_node;
    uint32_t sum = 0;
    for (int other = first; other < first + n; ++other) sum += ranks_[other].load;
    const int32_t mean = (sum + n - 1) / n;
    const int32_t quota = mean + mean / kSlack;
    const int32_t own = ranks_[rank].load;
    int32_t given = 0, room = 0;
    for (int other = first; other < first + n; ++other) {
      const int32_t load = ranks_[other].load;
      if (load > own || (load == own && other < rank)) given += max(load - quota, 0);
      if (load < own || (load == own && other < rank)) room += max(quota - load, 0);
    }
    ranks_[rank].given = {given, given + max(own - quota, 0)};
    ranks_[rank].room = {room, room + max(quota - own, 0)};
  }

  __device__ void LayOutExpert(int e) const {
    const Piece home = ranks_[HomeOf(e)].given, own = experts_[e].given;
    const auto at = [&](int32_t i) { return home.begin + min(i, home.end - home.begin); };
    experts_[e].given = {at(own.begin), at(own.end)};
  }

  __device__ void CountPieces() const {
    for (int rank = WarpIndex(); rank < args_.n_ranks; rank += kWarps) {
      const int32_t given = ranks_[rank].given.begin, room = ranks_[rank].room.begin;
      const int first = FirstRankOf(rank) * n_local_;
      int32_t n_before_given = 0, n_before_room = 0;
      for (int i = LaneIndex(); i < per_node_; i += kWarpSize) {
        const Piece piece = experts_[first + i].given;
        n_before_given += !piece.IsEmpty() && piece.end <= given;
        n_before_room += !piece.IsEmpty() && piece.end <= room;
      }
      n_before_given = __reduce_add_sync(kAllLanes, n_before_given);
      n_before_room = __reduce_add_sync(kAllLanes, n_before_room);
      if (LaneIndex() > 0) continue;
      ranks_[rank].n_before_given = n_before_given;
      ranks_[rank].n_before_room = n_before_room;
    }
  }

  // The slot for an expert on a rank that has room for a part of it.
  __device__ int32_t SlotOf(int e, int rank) const {
    return ranks_[HomeOf(e)].n_before_given + experts_[e].index - ranks_[rank].n_before_room;
  }

  // The choices of an expert that each rank takes: how many of its own, and where in the order of
  // all others those end that come from elsewhere.
  __device__ void Share(int e) const {
    const int n_experts = args_.n_experts, home = HomeOf(e), first = FirstRankOf(home);
    const Piece given = experts_[e].given;
    int32_t n_home = experts_[e].total;
    for (int r = first; r < first + args_.n_ranks_per_node; ++r) {
      int32_t taken = given.Overlap(ranks_[r].room);
      const int32_t slot = taken > 0 ? SlotOf(e, r) : 0;
      if (slot >= args_.n_slots) taken = 0;
      ends_[r * n_experts + e] = taken;
      n_home -= taken;
      if (taken > 0 && blockIdx.x == 0) args_.copies[r * args_.n_slots + slot] = e;
    }
    int32_t end = 0, start = 0, own_here = 0;
#pragma unroll 4
    for (int r = 0; r < args_.n_ranks; ++r) {
      const bool is_of_node = r >= first && r < first + args_.n_ranks_per_node;
      const int32_t rows = r == home ? n_home : is_of_node ? ends_[r * n_experts + e] : 0;
      const int32_t count = __ldg(args_.counts + r * n_experts + e);
      const int32_t own = min(count, rows);
      if (r < rank_) start += count - own;
      if (r == rank_) own_here = own;
      end += rows - own;
      ends_[r * n_experts + e] = end;
    }
    experts_[e].own = own_here;
    experts_[e].start = start - own_here;
  }

  // The turns of an expert's first choices in each warp.
  __device__ void StartTurns(int e) const {
    int32_t turn = experts_[e].turn;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      int32_t* const start = turns_ + warp * args_.n_experts + e;
      const int32_t count = *start;
      *start = turn;
      turn += count;
    }
  }

  __device__ void Place() const {
    int32_t* const turns = turns_ + WarpIndex() * args_.n_experts;
    const int lane = LaneIndex();
    for (int i = lane; i - lane < warp_ids_.size; i += kWarpSize) {
      const int32_t id = i < warp_ids_.size ? __ldg(warp_ids_.first + i) : kNoGroup;
      const bool is_expert = IsExpert(args_, id);
      const uint32_t equals = __match_any_sync(kAllLanes, id);
      const uint32_t before = equals & ((1u << lane) - 1);
      const int32_t turn = is_expert ? turns[id] : 0;
      __syncwarp();
      if (is_expert && before == 0) turns[id] = turn + __popc(equals);
      __syncwarp();
      if (i >= warp_ids_.size) continue;
      const int32_t none = id == kNoGroup ? kNoGroup : kInvalidGroup;
      args_.group_ids[warp_ids_.offset + i] = is_expert ? GroupOf(id, turn + __popc(before)) : none;
    }
  }

  // The group of this rank's choice of an expert that has so many before it.
  __device__ int32_t GroupOf(int e, int32_t turn) const {
    int to = rank_;
    if (turn >= experts_[e].own) {
      const int32_t at = experts_[e].start + turn;
      to = 0;
#pragma unroll 4
      for (int r = 0; r < args_.n_ranks - 1; ++r) to += ends_[r * args_.n_experts + e] <= at;
    }
    const int home = HomeOf(e);
    const int local = to == home ? e - home * n_local_ : n_local_ + SlotOf(e, to);
    return to * (args_.n_shared + n_local_ + args_.n_slots) + args_.n_shared + local;
  }

  const BalanceArgs& args_;
  const int rank_, n_local_, per_node_;
  const Ids ids_, warp_ids_;
  int32_t* const ends_;   // [R, E]: see Share
  int32_t* const turns_;  // [kWarps, E]: its choices before the warp's next one
  Expert* const experts_;
  Rank* const ranks_;
};

__global__ void __launch_bounds__(kThreads) BalanceChoices(const BalanceArgs args) {
  extern __shared__ int32_t smem[];
  Balancer(args, smem).Run();
}

}  // namespace

cudaError_t LoadBalance() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, CountChoices);
  int unused = 0;
  if (error != cudaSuccess) return error;
  return LoadKernel(reinterpret_cast<const void*>(BalanceChoices), kThreads, kMaxBalanceSmemBytes,
                    &unused);
}

cudaError_t LaunchCountChoices(const CountChoicesArgs& args, cudaStream_t stream) {
  const size_t n_bytes = args.n_experts * sizeof(int32_t);
  if (args.n_blocks > 1) {
    const cudaError_t error = cudaMemsetAsync(args.counts, 0, n_bytes, stream);
    if (error != cudaSuccess) return error;
  }
  return LaunchKernel(CountChoices, {dim3(args.n_blocks), kThreads, n_bytes, stream}, args);
}

cudaError_t LaunchBalanceChoices(const BalanceArgs& args, cudaStream_t stream) {
  const size_t n_bytes = BalanceSmemBytes(args.n_experts, args.n_ranks);
  return LaunchKernel(BalanceChoices, {dim3(args.n_blocks), kThreads, n_bytes, stream}, args);
}

}  // namespace jax_ep::p2p
