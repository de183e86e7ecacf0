// Results of dispatch that were changed before combine or its backward: nothing is written outside
// of the buffers, the call ends in time, and its rank says why it has failed.
#pragma once

#include <climits>
#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/p2p/p2p_calls.h"
#include "tests/p2p/p2p_expect.h"
#include "tests/p2p/p2p_fixture.h"
#include "tests/p2p/p2p_routings.h"

namespace jax_ep::p2p {

// The field that is changed: of the handle, or another one that combine or its backward reads.
enum class Field { kCounts, kToken, kRow, kGroupIds, kOffsets, kSrcInfo };
constexpr Field kFields[] = {Field::kCounts,   Field::kToken,   Field::kRow,
                             Field::kGroupIds, Field::kOffsets, Field::kSrcInfo};
// The value that it is changed to: a number that nothing has, or another one that exists.
enum class Change { kNegative, kLowest, kFirstBeyond, kHighest, kRandom, kOther };
constexpr Change kChanges[] = {Change::kNegative, Change::kLowest, Change::kFirstBeyond,
                               Change::kHighest,  Change::kRandom, Change::kOther};

struct TamperedCall {
  const char* name;
  CombineMode mode;
  bool is_grad = false;
  bool uses_ll = false;
  bool splits_blocks = false;  // with rings or bulk copies
  bool is_async = false;
  bool has_scalars = false;
};

inline std::vector<TamperedCall> TamperedCalls() {
  constexpr auto kNone = Weighting::kNone, kSource = Weighting::kSource, kRow = Weighting::kRow;
  constexpr bool kGrad = true, kLL = true, kSplit = true, kAsync = true, kScalars = true;
  return {
      {"combine", {kSource, true, false}},
      {"combine, shared expert", {kRow, true, true}},
      {"combine, scalars", {kNone, true, false}, !kGrad, !kLL, !kSplit, !kAsync, kScalars},
      {"combine, choices", {kNone, false, false}},
      {"combine, choices in rings", {kNone, false, false}, !kGrad, !kLL, kSplit},
      {"combine in rings", {kRow, true, true}, !kGrad, !kLL, kSplit},
      {"LL combine", {kSource, true, false}, !kGrad, kLL},
      {"LL combine, shared expert", {kRow, true, true}, !kGrad, kLL},
      {"combine_async", {kNone, true, false}, !kGrad, !kLL, !kSplit, kAsync},
      {"combine_async in LL packets", {kNone, true, false}, !kGrad, kLL, !kSplit, kAsync},
      {"backward", {kSource, true, false}, kGrad},
      {"backward, shared expert", {kRow, true, true}, kGrad},
      {"backward, choices", {kNone, false, false}, kGrad},
      {"backward in bulk", {kSource, true, false}, kGrad, !kLL, kSplit},
      {"backward, async", {kRow, true, false}, kGrad, !kLL, !kSplit, kAsync},
  };
}

// One change of one rank, and the call after it.
class Tampered {
 public:
  Tampered(int n_ranks, const std::vector<int>& devices, const TamperedCall& call, double limit_s,
           unsigned seed)
      : call_(call),
        limit_s_(limit_s),
        random_(seed),
        rank_(static_cast<int>(random_() % n_ranks)),
        fixture_(SizesOf(n_ranks), devices, limit_s, /*n_sms=*/0, /*format=*/{}, call.uses_ll),
        calls_(fixture_, MakeSharedIds(), random_,
               {/*returns_rows=*/true, call.mode.adds_shared_expert, /*has_choices=*/true,
                /*guard=*/8192}) {
    if (call.splits_blocks) fixture_.SplitBlocks(/*receives_in_bulk=*/true, /*ring_slots=*/2);
    fixture_.is_async = call.is_async;
  }

  void Run(Field field, Change change) {
    const std::string name = std::string("tampered, ") + call_.name + ", field " +
                             std::to_string(static_cast<int>(field)) + ", change " +
                             std::to_string(static_cast<int>(change));
    running = name;
    if (!calls_.Dispatch(call_.mode.weighting == Weighting::kRow, name)) return;
    CHECK_CUDA(cudaSetDevice(fixture_.devices[rank_]));
    const bool must_fail = Corrupt(field, change);

    const Stopwatch watch;
    if (call_.is_grad) {
      calls_.LaunchGrads(call_.mode);
    } else {
      fixture_.ForLocalRanks([&](int rank) {
        calls_.LaunchCombine(rank, call_.mode, /*has_residual=*/false, call_.has_scalars);
      });
    }
    fixture_.Sync();  // an access beyond memory would be an error of the device
    CHECK_CUDA(cudaGetLastError());
    const double passed_s = watch.Seconds();
    Expect(passed_s < limit_s_ + 0.8, name + ": took " + std::to_string(passed_s));
    fixture_.ForLocalRanks([&](int rank) {
      Expect(calls_.buffers(rank).AreGuardsIntact(), name + ": wrote beyond the results");
    });
    if (!must_fail) return;
    const std::string message = fixture_.group->CheckFailure(rank_).message;
    const std::string wanted = "that of rank " + std::to_string(rank_) + " was changed";
    Expect(message.find(wanted) != std::string::npos, name + ": got \"" + message + "\"");
  }

 private:
  static constexpr int kTokens = 8;       // few enough for asynchronous LL calls
  static constexpr int kMaxTokens = 100;  // more than can go in LL packets

  static CaseSizes SizesOf(int n_ranks) {
    CaseSizes sizes{n_ranks, n_ranks * 4, 4, kMaxTokens, 64, kTokens * n_ranks * 4 + 16};
    sizes.row_alignment = 4;
    return sizes;
  }

  std::vector<std::vector<int32_t>> MakeSharedIds() {
    auto ids = MakeAllIds(fixture_.sizes, Pattern::kUniform, kTokens, random_);
    for (int rank = 0; call_.mode.adds_shared_expert && rank < fixture_.sizes.n_ranks; ++rank) {
      ShareLastChoice(fixture_.sizes, rank, ids[rank]);
    }
    return ids;
  }

  // The number that replaces `value`, of which those from 0 to `end` - 1 can be. `none`: the lowest
  // number that stands for something else.
  int32_t Changed(Change change, int32_t value, int32_t end, int32_t none = 0) {
    switch (change) {
      case Change::kNegative:
        return none - 1;
      case Change::kLowest:
        return INT_MIN;
      case Change::kFirstBeyond:
        return end;
      case Change::kHighest:
        return INT_MAX;
      case Change::kRandom:
        return static_cast<int32_t>(end + random_() % (INT_MAX - end));
      case Change::kOther:
        break;
    }
    return (value + 1) % end;
  }

  // Replaces a value of the field; returns whether the call must fail.
  bool Corrupt(Field field, Change change) {
    const CaseSizes& sizes = fixture_.sizes;
    RankBuffers<float>& b = calls_.buffers(rank_);
    const int32_t n_rows = sizes.max_recv_tokens;
    const bool is_other = change == Change::kOther;
    switch (field) {
      case Field::kCounts:
        ChangeAt(b.message_counts, random_() % sizes.n_ranks, change, kMaxTokens + 1);
        return !is_other;
      case Field::kToken:
        ChangeAt(b.message_rows, FindMessage(), change, call_.uses_ll ? kTokens : kMaxTokens);
        return !is_other;
      case Field::kRow:
        ChangeAt(b.message_rows, FindRow(), change, n_rows, kDropped);
        return !is_other;
      case Field::kGroupIds:  // names other groups, or none
        ChangeAt(b.group_ids, random_() % b.group_ids.size(), change, sizes.n_groups);
        return false;
      case Field::kOffsets: {
        std::vector<uint32_t> offsets = b.row_offsets.Read();
        uint32_t& offset = offsets[random_() % offsets.size()];
        offset = static_cast<uint32_t>(Changed(change, static_cast<int32_t>(offset), n_rows + 1));
        b.row_offsets.Write(offsets);
        return !is_other;
      }
      case Field::kSrcInfo:
        ChangeAt(b.src_info, random_() % b.src_info.size(), change, kTokens);
        return false;
    }
    return false;
  }

  void ChangeAt(DeviceArray<int32_t>& array, size_t at, Change change, int32_t end,
                int32_t none = 0) {
    std::vector<int32_t> values = array.Read();
    values[at] = Changed(change, values[at], end, none);
    array.Write(values);
  }

  // The position of a message in message_rows.
  size_t FindMessage() {
    const CaseSizes& sizes = fixture_.sizes;
    const std::vector<int32_t> counts = calls_.buffers(rank_).message_counts.Read();
    int source = static_cast<int>(random_() % sizes.n_ranks);
    while (counts[source] == 0) source = (source + 1) % sizes.n_ranks;
    const size_t slot = random_() % counts[source];
    return (size_t{1} * source * sizes.max_tokens + slot) * (1 + sizes.n_choices);
  }

  // The position of a message's row there.
  size_t FindRow() {
    const size_t message = FindMessage(), n_choices = fixture_.sizes.n_choices;
    const std::vector<int32_t> rows =
        calls_.buffers(rank_).message_rows.Read(message + 1, n_choices);
    size_t k = random_() % n_choices;
    while (rows[k] < 0) k = (k + 1) % n_choices;
    return message + 1 + k;
  }

  const TamperedCall call_;
  const double limit_s_;
  std::mt19937 random_;
  const int rank_;  // whose values are changed
  Fixture<float> fixture_;
  Calls<float> calls_;
};

// Every call with every change of every field, or of each `stride` one.
inline void RunTampered(int n_ranks, const std::vector<int>& devices, double limit_s, int stride) {
  int n_cases = 0, n_run = 0;
  for (const TamperedCall& call : TamperedCalls()) {
    for (const Field field : kFields) {
      if (!call.is_grad && field >= Field::kOffsets) continue;  // combine does not take them
      for (const Change change : kChanges) {
        if (n_cases++ % stride != 0) continue;
        ++n_run;
        Tampered(n_ranks, devices, call, limit_s, static_cast<unsigned>(n_cases))
            .Run(field, change);
      }
    }
  }
  std::printf("tampered: R=%d, %d changes, %d errors\n", n_ranks, n_run, n_errors);
}

}  // namespace jax_ep::p2p
