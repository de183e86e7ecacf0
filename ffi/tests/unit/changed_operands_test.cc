// Tests of operands and results that someone else writes while a call runs: the call follows no
// index that it has not checked. Run by host_test, also under the sanitizers.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "core/formats.h"
#include "core/routing.h"
#include "host/combine.h"
#include "host/dispatch.h"
#include "host/group.h"
#include "host/rendezvous.h"
#include "tests/unit/check.h"
#include "tests/unit/host_rank.h"
#include "tests/unit/silu_atoms.h"

namespace jax_ep::host {
namespace {

constexpr int64_t kRanks = 2;
constexpr CombineMode kMode{Weighting::kSource, /*reduce=*/true, /*adds_shared_expert=*/true};

using Rank = HostRank<float>;
using Work = void (*)(const Pool&, const std::vector<Arrival>&);

// What indices become: numbers that none may be, others, or -1.
template <class T>
void Overwrite(std::vector<T>& indices, uint32_t seed) {
  std::mt19937 random(seed);
  for (T& index : indices) {
    const uint32_t bits = random();
    const uint32_t kinds[] = {bits >> 2, bits >> 2 | 0x80000000u, bits % 256 / 4, ~0u};
    index = static_cast<T>(kinds[bits % 4]);
  }
}

// The ranks of a layer in which some rows are padding, and some are dropped.
class Layer {
 public:
  explicit Layer(const RowFormat& format) {
    const GroupSizes sizes{kRanks,          /*n_groups=*/6,
                           /*n_choices=*/4, /*max_tokens=*/40,
                           /*hidden=*/64,   /*max_recv_tokens=*/128};
    const HostGroupConfig config{sizes, kRanks, /*row_alignment=*/16, /*token_bytes=*/256,
                                 /*timeout_s=*/1};
    const auto group = std::make_shared<HostGroup>(config, MakeDevices(kRanks));
    std::mt19937 random(1);
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      ranks_.push_back(std::make_unique<Rank>(group, rank, format, RowType::kFloat32));
      Rank& made = *ranks_.back();
      for (float& x : made.tokens) x = static_cast<float>(random() % 16);
      for (float& weight : made.topk_weights) weight = static_cast<float>(random() % 8);
      for (int64_t i = 0; i < made.n_choices; ++i) {
        const bool is_shared = i % sizes.n_choices == sizes.n_choices - 1;
        const int64_t any = static_cast<int64_t>(random() % (sizes.n_groups + 2)) - 1;
        made.group_ids[i] = static_cast<int32_t>(is_shared ? rank * sizes.n_local_groups() : any);
      }
    }
  }

  // Makes the calls of a layer. Before each begins to move rows, change(rank) may write what it has
  // checked, which is then restored. Returns the bytes of all defined results.
  template <class Change>
  std::vector<uint8_t> Run(const Change& change) {
    std::vector<uint8_t> results;
    const auto add = [&](const auto& values, size_t n) {
      const auto* const bytes = reinterpret_cast<const uint8_t*>(values.data());
      results.insert(results.end(), bytes, bytes + n * sizeof(values[0]));
    };
    Call([](Rank& rank) { return rank.Dispatch(); }, DispatchAll, change);
    for (const auto& rank : ranks_) {
      add(rank->dst_rows, rank->dst_rows.size());
      add(rank->row_offsets, rank->row_offsets.size());
      add(rank->src_info, 2 * rank->row_offsets.back());
      add(rank->rows, rank->row_offsets.back() * rank->row_bytes);
    }
    if (!ranks_[0]->format.format->is_plain()) return results;
    Call([](Rank& rank) { return rank.Combine(kMode); }, CombineAll, change);
    Call([](Rank& rank) { return rank.CombineGrad(kMode); }, CombineGradAll, change);
    for (const auto& rank : ranks_) {
      add(rank->out, rank->out.size());
      add(rank->grad_rows, rank->row_offsets.back() * rank->sizes.hidden_size);
      add(rank->grad_weights, rank->grad_weights.size());
    }
    return results;
  }

  const Rank& rank(int64_t i) const { return *ranks_[i]; }

 private:
  template <class MakeArgs, class Change>
  void Call(const MakeArgs& make_args, Work work, const Change& change) {
    std::vector<Arrival> arrivals;
    for (const auto& rank : ranks_) arrivals.push_back({rank->rank, make_args(*rank), nullptr});
    std::vector<Operands> before;
    for (const auto& rank : ranks_) {
      before.push_back({rank->group_ids, rank->dst_rows, rank->row_offsets});
      change(*rank);
    }
    work(Pool{}, arrivals);
    for (int64_t i = 0; i < kRanks; ++i) {
      ranks_[i]->group_ids = before[i].group_ids;
      if (work == DispatchAll) continue;  // the others are results
      ranks_[i]->dst_rows = before[i].dst_rows;
      ranks_[i]->row_offsets = before[i].row_offsets;
    }
  }

  struct Operands {
    std::vector<int32_t> group_ids, dst_rows;
    std::vector<uint32_t> row_offsets;
  };
  std::vector<std::unique_ptr<Rank>> ranks_;
};

const RowFormat kFormats[] = {{FindTokenFormat("plain_float32"), ScalesLayout::kNone},
                              {FindTokenFormat("mxfp8"), ScalesLayout::kAtoms}};

// An access out of bounds mostly ends the program; a sanitizer finds them all.
TEST(CallsStayInBoundsWhateverIndicesBecome) {
  for (const RowFormat& format : kFormats) {
    Layer layer(format);
    const auto keep = [](const Rank&) {};
    const std::vector<uint8_t> expected = layer.Run(keep);
    CHECK_EQ(layer.rank(0).n_dropped > 0, true);
    for (uint32_t seed = 0; seed < 30; ++seed) {
      layer.Run([seed](Rank& rank) {
        if (seed % 4 != 1) Overwrite(rank.group_ids, seed);
        if (seed % 4 != 2) Overwrite(rank.dst_rows, seed + 1000);
        if (seed % 4 != 3) Overwrite(rank.row_offsets, seed + 2000);
      });
      CHECK_EQ(layer.Run(keep) == expected, true);
    }
  }
}

TEST(ChoicesWhoseGroupIsGoneHaveNoRow) {
  Layer layer(kFormats[0]);
  layer.Run([](Rank& rank) { std::fill_n(rank.group_ids.begin(), rank.n_choices, kNoGroup); });
  for (int64_t i = 0; i < kRanks; ++i) {
    for (const int32_t row : layer.rank(i).dst_rows) CHECK_EQ(row, kNoRow);
    for (const float x : layer.rank(i).out) CHECK_EQ(x, 0.0f);
  }
}

// The results of a fused_silu whose row offsets change, if at all, once it shares out the rows.
std::vector<uint8_t> ActivateRows(bool changes) {
  SiluAtoms atoms{/*n_rows=*/300, /*row_size=*/128, /*row_offsets=*/{0, 5, 140, 290}};
  int n_changes = 0;
  const auto change = [&](const auto&) {  // in place of a task for another thread
    if (changes && n_changes++ == 0) Overwrite(atoms.row_offsets, 5);
  };
  CHECK_EQ(silu::FusedSilu(Pool{change, /*n_threads=*/2}, atoms.Call()).message, "");
  CHECK_EQ(n_changes > 0, changes && std::thread::hardware_concurrency() > 1);
  atoms.out.insert(atoms.out.end(), atoms.scales.begin(), atoms.scales.end());
  return atoms.out;
}

TEST(ActivationFollowsTheOffsetsThatItHasChecked) {
  CHECK_EQ(ActivateRows(/*changes=*/true) == ActivateRows(/*changes=*/false), true);
}

}  // namespace
}  // namespace jax_ep::host
