// Operands that another stream writes while calls read them: nothing is written outside of the
// buffers, and the calls end in time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/formats.h"
#include "tests/p2p/p2p_calls.h"
#include "tests/p2p/p2p_expect.h"
#include "tests/p2p/p2p_fixture.h"
#include "tests/p2p/p2p_memory.h"
#include "tests/p2p/p2p_tampered.h"

namespace jax_ep::p2p {

// Writes arrays of the current device on a stream of its own, over and over: other values of the
// array, in another order, or any numbers.
class Writer {
 public:
  explicit Writer(std::mt19937& random) : random_(random) {
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  Writer(const Writer&) = delete;
  ~Writer() { cudaStreamDestroy(stream_); }

  template <class T>
  void Add(DeviceArray<T>& array) {
    static_assert(sizeof(T) == sizeof(uint32_t));
    const std::vector<T> before = array.Read();
    for (int i = 0; i < kVersions; ++i) {
      std::vector<T> values = before;
      if (i > 0) std::shuffle(values.begin(), values.end(), random_);
      for (T& value : values) {
        if (i == kVersions - 1) value = static_cast<T>(random_());
      }
      auto& memory = versions_.emplace_back(std::make_unique<PinnedMemory>());
      void* const host = memory->Get(values.size() * sizeof(T));
      std::memcpy(host, values.data(), values.size() * sizeof(T));
      copies_.push_back({array.get(), host, values.size() * sizeof(T)});
    }
  }

  // Some microseconds of writing.
  void Write() {
    for (int i = 0; i < kCopies && !copies_.empty(); ++i) {
      const Copy& copy = copies_[random_() % copies_.size()];
      CHECK_CUDA(cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyHostToDevice, stream_));
    }
  }
  void Sync() const { CHECK_CUDA(cudaStreamSynchronize(stream_)); }

 private:
  static constexpr int kVersions = 4, kCopies = 24;
  struct Copy {
    void* to;
    const void* from;
    size_t bytes;
  };

  std::mt19937& random_;
  cudaStream_t stream_;
  std::vector<std::unique_ptr<PinnedMemory>> versions_;
  std::vector<Copy> copies_;
};

struct ChangingCall : TamperedCall {
  bool is_dispatch = false;
  const char* format = nullptr;  // of dispatch; null: tokens travel as they are
};

inline std::vector<ChangingCall> ChangingCalls() {
  std::vector<ChangingCall> calls;
  for (const TamperedCall& call : TamperedCalls()) calls.push_back({call});
  const auto add = [&](const char* name, bool uses_ll, bool splits_blocks, const char* format) {
    ChangingCall call{{name, {Weighting::kRow, true, false}}, /*is_dispatch=*/true, format};
    call.uses_ll = uses_ll, call.splits_blocks = splits_blocks;
    calls.push_back(call);
  };
  add("dispatch", false, false, nullptr);
  add("dispatch in bulk", false, true, nullptr);
  add("LL dispatch", true, false, nullptr);
  add("dispatch of codes", false, false, "mxfp8");
  add("dispatch of codes in bulk", false, true, "mxfp8");
  add("LL dispatch of codes", true, false, "mxfp8");
  return calls;
}

// A call of all ranks while the operands of all of them change.
class Changing {
 public:
  Changing(int n_ranks, const std::vector<int>& devices, const ChangingCall& call, double limit_s,
           unsigned seed)
      : call_(call),
        limit_s_(limit_s),
        random_(seed),
        fixture_(SizesOf(n_ranks), devices, limit_s, /*n_sms=*/0, FormatOf(call), call.uses_ll),
        calls_(fixture_, MakeAllIds(fixture_.sizes, Pattern::kUniform, kTokens, random_), random_,
               {/*returns_rows=*/true, /*adds_shared_expert=*/false, /*has_choices=*/true,
                /*guard=*/8192}) {
    if (call.splits_blocks) fixture_.SplitBlocks(/*receives_in_bulk=*/true, /*ring_slots=*/2);
    fixture_.is_async = call.is_async;
  }

  void Run() {
    const std::string name = std::string("changing, ") + call_.name;
    running = name;
    const bool has_weights = call_.mode.weighting == Weighting::kRow;
    if (!call_.is_dispatch && !calls_.Dispatch(has_weights, name)) return;
    std::vector<std::unique_ptr<Writer>> writers;
    fixture_.ForLocalRanks([&](int rank) {
      RankBuffers<float>& b = calls_.buffers(rank);
      Writer& writer = *writers.emplace_back(std::make_unique<Writer>(random_));
      writer.Add(b.group_ids);
      if (call_.is_dispatch) return;
      writer.Add(b.message_counts), writer.Add(b.message_rows);
      if (call_.is_grad) writer.Add(b.row_offsets), writer.Add(b.src_info);
    });
    const auto write = [&] {
      size_t i = 0;
      fixture_.ForLocalRanks([&](int) { writers[i++]->Write(); });
    };

    const Stopwatch watch;
    write();
    Launch(has_weights);
    write();
    fixture_.Sync();  // an access beyond memory would be an error of the device
    const double passed_s = watch.Seconds();
    size_t i = 0;
    fixture_.ForLocalRanks([&](int) { writers[i++]->Sync(); });
    CHECK_CUDA(cudaGetLastError());
    Expect(passed_s < limit_s_ + 0.8, name + ": took " + std::to_string(passed_s));
    fixture_.ForLocalRanks([&](int rank) {
      Expect(calls_.buffers(rank).AreGuardsIntact(), name + ": wrote beyond the results");
    });
  }

 private:
  static constexpr int kTokens = 32;

  static CaseSizes SizesOf(int n_ranks) {
    CaseSizes sizes{n_ranks, n_ranks * 4, 4, /*max_tokens=*/100, 64, kTokens * n_ranks * 4 + 16};
    sizes.row_alignment = 4;
    return sizes;
  }
  static RowFormat FormatOf(const ChangingCall& call) {
    if (call.format == nullptr) return {};
    return {FindTokenFormat(call.format), ScalesLayout::kAtoms};
  }

  void Launch(bool has_weights) {
    if (call_.is_grad) return calls_.LaunchGrads(call_.mode);
    fixture_.ForLocalRanks([&](int rank) {
      if (call_.is_dispatch) return calls_.LaunchDispatch(rank, has_weights);
      calls_.LaunchCombine(rank, call_.mode, /*has_residual=*/false, call_.has_scalars);
    });
  }

  const ChangingCall call_;
  const double limit_s_;
  std::mt19937 random_;
  Fixture<float> fixture_;
  Calls<float> calls_;
};

// Each call `n_rounds` times.
inline void RunChanging(int n_ranks, const std::vector<int>& devices, double limit_s,
                        int n_rounds) {
  const std::vector<ChangingCall> calls = ChangingCalls();
  for (int round = 0; round < n_rounds; ++round) {
    for (const ChangingCall& call : calls) {
      Changing(n_ranks, devices, call, limit_s, static_cast<unsigned>(round)).Run();
    }
  }
  std::printf("changing: R=%d, %d rounds of %zu calls, %d errors\n", n_ranks, n_rounds,
              calls.size(), n_errors);
}

}  // namespace jax_ep::p2p
