// Tests of split calls of the p2p kernels: sending and receiving halves and whole calls in random
// orders, every result compared bit for bit with p2p_reference.h.
//
//   p2p_split_test RANKS DEVICES N_SEQUENCES [SEED]
//
// Every rank runs the same sequence, enqueued rank by rank, so that some run ahead of the others as
// far as the protocol lets them. Ranks share the devices 0 to DEVICES - 1 evenly.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "tests/p2p_bed.h"

namespace jax_ep::p2p {
namespace {

using T = BFloat16;
struct Operation {
  int step;  // whose buffers
  bool is_combine;
  Half half;
};

// A call of each kind for every step, whole or in halves, any number of them in flight.
std::vector<Operation> MakeSequence(int n_steps, std::mt19937& random) {
  std::vector<Operation> sequence;
  for (const bool is_combine : {false, true}) {
    std::vector<int> in_flight;
    for (int step = 0; step < n_steps || !in_flight.empty();) {
      if (!in_flight.empty() && (step == n_steps || random() % 5 < 2)) {
        const size_t which = random() % in_flight.size();
        sequence.push_back({in_flight[which], is_combine, Half::kReceive});
        in_flight.erase(in_flight.begin() + which);
      } else if (random() % 3 == 0) {
        sequence.push_back({step++, is_combine, Half::kBoth});
      } else {
        in_flight.push_back(step);
        sequence.push_back({step++, is_combine, Half::kSend});
      }
    }
  }
  return sequence;
}

class Sequence {
 public:
  Sequence(const Shape& shape, const std::vector<int>& devices, int n_steps, std::mt19937& random)
      : shape_(shape),
        bed_(shape, devices, 5.0),
        buffers_(n_steps),
        tokens_(n_steps),
        weights_(n_steps) {
    for (int step = 0; step < n_steps; ++step) {
      std::vector<std::vector<int32_t>> ids;
      for (int rank = 0; rank < shape.n_ranks; ++rank) {
        ids.push_back(MakeIds(shape, step % 2 ? Pattern::kZipf : Pattern::kUniform,
                              shape.max_tokens, random));
      }
      routings_.emplace_back(shape, ids);
      for (int rank = 0; rank < shape.n_ranks; ++rank) Fill(step, rank, ids[rank], random);
    }
  }

  void Run(const std::vector<Operation>& sequence, const std::vector<int>& order_of_ranks) {
    for (const int rank : order_of_ranks) {
      for (const Operation& operation : sequence) Launch(rank, operation);
    }
    bed_.Sync();
  }

  // Wrong elements, or -1 if a call did not end.
  int CountErrors() {
    if (!bed_.IsHealthy()) return -1;
    int n_bad = 0;
    for (size_t step = 0; step < buffers_.size(); ++step) {
      for (int rank = 0; rank < shape_.n_ranks; ++rank) n_bad += CountErrors(step, rank);
    }
    return n_bad;
  }

 private:
  void Fill(int step, int rank, const std::vector<int32_t>& ids, std::mt19937& random) {
    CHECK_CUDA(cudaSetDevice(bed_.devices[rank]));
    RankBuffers<T>& b = buffers_[step].emplace_back(shape_, shape_.max_tokens, shape_.max_tokens);
    tokens_[step].push_back(RandomValues<T>(b.tokens.size(), random));
    std::vector<float> weights(ids.size());
    for (float& weight : weights) weight = static_cast<float>(random() % 1000 + 1) / 1000.0f;
    weights_[step].push_back(weights);
    b.tokens.Write(tokens_[step][rank]);
    b.topk_ids.Write(ids);
    b.topk_weights.Write(weights);
    b.PoisonResults();
    b.out.Poison();
    CHECK_CUDA(cudaDeviceSynchronize());
  }

  void Launch(int rank, const Operation& operation) {
    const RankBuffers<T>& b = buffers_[operation.step][rank];
    if (operation.is_combine) {
      const CombineMode mode{Weighting::kRow, true, false};
      bed_.Launch(rank, bed_.CombineOf(rank, b, b.rows.get(), mode, operation.half));
    } else {
      bed_.Launch(rank, bed_.DispatchOf(rank, b, true, operation.half));
    }
  }

  int CountErrors(size_t step, int rank) {
    CHECK_CUDA(cudaSetDevice(bed_.devices[rank]));
    const RankBuffers<T>& b = buffers_[step][rank];
    const Routing& routing = routings_[step];
    int n_bad = b.row_offsets.Read() != routing.row_offsets[rank];
    n_bad += b.n_invalid.Read()[0] != routing.n_invalid[rank];
    const std::vector<T> rows = b.rows.Read();
    for (int row = 0; row < routing.n_rows(rank); ++row) {
      const RowOrigin& from = routing.rows[rank][row];
      const size_t token = static_cast<size_t>(from.token) * shape_.hidden;
      n_bad += std::memcmp(&rows[static_cast<size_t>(row) * shape_.hidden],
                           &tokens_[step][from.source][token], shape_.hidden * sizeof(T)) != 0;
    }
    const std::vector<T> out = b.out.Read();
    for (size_t i = 0; i < out.size(); ++i) {
      const int token = static_cast<int>(i / shape_.hidden);
      const T expected = CombineElement<T>(shape_, routing, rank, token, Weighting::kRow,
                                           weights_[step][rank].data(), nullptr,
                                           [&](int, int) { return tokens_[step][rank][i]; });
      n_bad += std::memcmp(&out[i], &expected, sizeof(T)) != 0;
    }
    return n_bad;
  }

  const Shape shape_;
  Bed<T> bed_;
  std::vector<Routing> routings_;                     // by step
  std::vector<std::vector<RankBuffers<T>>> buffers_;  // by step and rank
  std::vector<std::vector<std::vector<T>>> tokens_;   // the same
  std::vector<std::vector<std::vector<float>>> weights_;
};

int Main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: p2p_split_test RANKS DEVICES N_SEQUENCES [SEED]\n");
    return 2;
  }
  const int n_ranks = std::atoi(argv[1]), n_devices = std::atoi(argv[2]);
  const int n_sequences = std::atoi(argv[3]);
  const unsigned seed = argc > 4 ? std::atoi(argv[4]) : 1;
  std::vector<int> devices, order(n_ranks);
  for (int rank = 0; rank < n_ranks; ++rank) devices.push_back(rank * n_devices / n_ranks);
  std::iota(order.begin(), order.end(), 0);
  int n_failed = 0;
  for (int i = 0; i < n_sequences && n_failed < 5; ++i) {
    std::mt19937 random(seed + i);
    const int max_tokens = 1 + random() % 40;
    const Shape shape{n_ranks, n_ranks * 8, 4, max_tokens, 512, max_tokens * n_ranks * 4};
    const int n_steps = 3 + random() % 6;
    Sequence sequence(shape, devices, n_steps, random);
    std::shuffle(order.begin(), order.end(), random);
    sequence.Run(MakeSequence(n_steps, random), order);
    const int n_bad = sequence.CountErrors();
    if (n_bad != 0) std::printf("FAILED: sequence %d: %d\n", i, n_bad);
    n_failed += n_bad != 0;
  }
  std::printf("split: R=%d, %d sequences from seed %u, %d failed\n", n_ranks, n_sequences, seed,
              n_failed);
  return n_failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace jax_ep::p2p

int main(int argc, char** argv) { return jax_ep::p2p::Main(argc, argv); }
