// Tests of the token formats that quantize, run by host_test.

#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "core/formats.h"
#include "core/quantize.h"
#include "core/routing.h"
#include "host/dispatch.h"
#include "host/encode.h"
#include "tests/unit/check.h"
#include "tests/unit/fast_paths.h"
#include "tests/unit/host_rank.h"
#include "tests/unit/silu_atoms.h"
#include "tests/unit/thread_pool.h"

namespace jax_ep::host {
namespace {

TEST(GroupsArePaddedAndCutAtTheCapacity) {
  uint32_t row_offsets[5];
  int64_t first_row[4], n_rows[4];
  const auto ten_each = [](int64_t, int64_t) { return 10; };
  CHECK_EQ(ComputeRowOffsets(ten_each, 4, 1, /*max_recv_tokens=*/64, /*row_alignment=*/4, first_row,
                             n_rows, row_offsets),
           0);
  for (uint32_t i = 0; i < 5; ++i) CHECK_EQ(row_offsets[i], 12 * i);
  CHECK_EQ(ComputeRowOffsets(ten_each, 4, 1, /*max_recv_tokens=*/20, /*row_alignment=*/4, first_row,
                             n_rows, row_offsets),
           22);
  const uint32_t expected_offsets[] = {0, 12, 20, 20, 20};
  const int64_t expected_rows[] = {10, 8, 0, 0};
  for (int i = 0; i < 5; ++i) CHECK_EQ(row_offsets[i], expected_offsets[i]);
  for (int i = 0; i < 4; ++i) CHECK_EQ(n_rows[i], expected_rows[i]);
}

// Bytes of a token of 7168 elements, as docs/formats.md has them.
TEST(SizesAreThoseOfTheDocs) {
  const auto bytes = [](const char* name) {
    const TokenFormat& format = *FindTokenFormat(name);
    return format.payload_bytes(7168) + format.n_scales(7168) * format.scale_bytes();
  };
  CHECK_EQ(bytes("plain_bfloat16"), 14336);
  CHECK_EQ(bytes("blockwise_fp8"), 7168 + 224);
  CHECK_EQ(bytes("mxfp8"), 7168 + 224);
  CHECK_EQ(bytes("mxfp4"), 3584 + 224);
  CHECK_EQ(bytes("nvfp4"), 3584 + 448);
  CHECK_EQ(FindTokenFormat("fp8") == nullptr, true);
}

TEST(EveryCodeIsItsOwnNearest) {
  for (int code = 0; code < 0x7f; ++code) {
    const float value = FromE4m3(static_cast<uint8_t>(code));
    CHECK_EQ(static_cast<int>(ToE4m3(value)), code);
    CHECK_EQ(static_cast<int>(ToE4m3(-value)), code | 0x80);
  }
  const float values[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  for (int code = 0; code < 8; ++code) {
    CHECK_EQ(static_cast<int>(ToE2m1(values[code])), code);
    if (code == 7) break;
    const float middle = (values[code] + values[code + 1]) / 2;
    const int even = code + code % 2;
    CHECK_EQ(static_cast<int>(ToE2m1(middle)), even);
    CHECK_EQ(static_cast<int>(ToE2m1(std::nextafter(middle, 0.0f))), code);
    CHECK_EQ(static_cast<int>(ToE2m1(std::nextafter(middle, 8.0f))), code + 1);
  }
  CHECK_EQ(static_cast<int>(ToE2m1(INFINITY)), 7);
  CHECK_EQ(static_cast<int>(ToE4m3(-INFINITY)), 0xfe);
}

constexpr const TokenFormat& kFormat = *FindTokenFormat("nvfp4");

// Every token goes to both groups of rows of the next rank.
struct Sender : HostRank<float> {
  Sender(std::shared_ptr<HostGroup> group, int64_t rank)
      : HostRank(std::move(group), rank, {&kFormat, ScalesLayout::kAtoms}, RowType::kFloat32) {
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = std::sin(static_cast<float>(i + rank));
    for (size_t i = 0; i < group_ids.size(); ++i) {
      group_ids[i] = static_cast<int32_t>(((rank + 1) * 2 + static_cast<int64_t>(i) % 2) % 4);
    }
  }
};

// Computes where the rows of one group, and their scales, must stand, apart from the code under
// test.
void CheckRows(const Sender& from, const Sender& to, int64_t group) {
  const int64_t n_tokens = from.sizes.max_tokens_per_rank, size = from.sizes.hidden_size;
  const int64_t n_scales = size / 16, n_atoms = (n_scales + 3) / 4, row_bytes = size / 2;
  std::vector<uint8_t> codes(row_bytes), scales(n_scales);
  for (int64_t row = 0; row < (n_tokens + 127) / 128 * 128; ++row) {
    const bool is_used = row < n_tokens;
    if (is_used) {
      const Encoder encode = FindEncoder(kFormat, RowType::kFloat32);
      encode(from.tokens.data() + row * size, size, InputScale::Make(1.0f), codes.data(),
             scales.data());
      const uint8_t* const got = to.rows.data() + (group * n_tokens + row) * row_bytes;
      CHECK_EQ(std::memcmp(got, codes.data(), codes.size()), 0);
    }
    const int64_t block = group * ((n_tokens + 127) / 128) + row / 128;
    for (int64_t c = 0; c < n_atoms * 4; ++c) {
      const int64_t at = ((block * n_atoms + c / 4) * 32 + row % 32) * 16 + row % 128 / 32 * 4;
      const bool is_scale = is_used && c < n_scales;
      CHECK_EQ(static_cast<int>(to.scales[at + c % 4]), is_scale ? static_cast<int>(scales[c]) : 0);
    }
  }
}

TEST(RowsAreQuantizedOnTheWay) {
  GroupSizes sizes{};
  sizes.n_ranks = 2;
  sizes.n_groups = 4;
  sizes.n_choices = 2;
  sizes.hidden_size = 16 * 13;
  sizes.max_tokens_per_rank = 150;
  sizes.max_recv_tokens = 2 * sizes.max_tokens_per_rank;
  const HostGroupConfig config{sizes, /*n_ranks_per_node=*/2, /*row_alignment=*/1,
                               /*token_bytes=*/1, /*timeout_s=*/1};
  const auto group = std::make_shared<HostGroup>(config, MakeDevices(sizes.n_ranks));
  Sender ranks[] = {{group, 0}, {group, 1}};
  std::vector<Arrival> arrivals;
  for (Sender& sender : ranks) arrivals.push_back({sender.rank, sender.Dispatch(), nullptr});
  TestPool threads(3);
  DispatchAll(threads.pool(), arrivals);
  for (int64_t local_group : {0, 1}) {
    CheckRows(ranks[0], ranks[1], local_group);
    CheckRows(ranks[1], ranks[0], local_group);
  }
}

// The kernels' conversion of eight numbers at once, run on the host: every exponent, both signs,
// and fractions around the midpoints between codes.
TEST(WordsOfE2m1AreThoseOfOneByOne) {
  for (uint32_t top = 0; top < 1 << 12; ++top) {
    if ((top >> 3 & 0xff) == 0xff) continue;  // infinity and NaN
    float values[8];
    for (uint32_t i = 0; i < 8; ++i) values[i] = FloatFromBits(top << 20 | (i - 4) % (1u << 20));
    CHECK_EQ(CountWrongWords(values), 0u);
  }
}

// Counts the largest magnitudes in [first, end), as bits of float32, that take the fast path, and
// checks that it gives the exact scales.
template <class Format>
int CountFastPath(uint32_t first, uint32_t end, float input_scale) {
  const InputScale global = InputScale::Make(input_scale);
  int n_fast = 0;
  for (uint32_t bits = first; bits < end; bits += 1009) {
    const FastScale scale = TryFastScale<Format>(FloatFromBits(bits), global);
    n_fast += scale.is_taken;
    CHECK_EQ(scale.is_wrong, false);
  }
  return n_fast;
}

TEST(ScalesOnTheFastPathAreExact) {
  const uint32_t small = FloatBits(0.001f), large = FloatBits(1e4f);
  for (const float input_scale : {1.0f, 0.3f}) {
    for (const auto count :
         {CountFastPath<BlockwiseFp8>, CountFastPath<MxFp8>, CountFastPath<MxFp4>}) {
      CHECK_EQ(count(small, large, input_scale), static_cast<int>((large - small) / 1009 + 1));
      count(0, 0x80000000u - 1009, input_scale);
      // Zero, infinity and NaN take the slow path.
      CHECK_EQ(count(0, 1, input_scale), 0);
      CHECK_EQ(count(kFloatInfinity, 0x80000000u - 1009, input_scale), 0);
    }
    CHECK_EQ(CountFastPath<NvFp4>(0, 0x80000000u - 1009, input_scale) > 0, true);
    CHECK_EQ(CountFastPath<NvFp4>(kFloatInfinity, 0x80000000u - 1009, input_scale), 0);
  }
}

TEST(ActivationTouchesRowsInUseAlone) {
  constexpr int64_t kUsed = 131;
  SiluAtoms atoms{/*n_rows=*/200, /*row_size=*/32, /*row_offsets=*/{0, 1, kUsed}};
  TestPool threads(3);
  CHECK_EQ(silu::FusedSilu(threads.pool(), atoms.Call()).message, "");
  constexpr uint8_t kUntouched = SiluAtoms::kUntouched;
  for (int64_t i = 0; i < atoms.n_rows * atoms.row_size; ++i) {
    CHECK_EQ(atoms.out[i] == kUntouched, i >= kUsed * atoms.row_size);
  }
  const std::vector<uint8_t>& scales = atoms.scales;
  // One row in the block of the first group, 130 in the two blocks of the second.
  for (int64_t row = 0; row < static_cast<int64_t>(scales.size()) / kAtomScales; ++row) {
    const int64_t block = row / kAtomRows, at = block * kAtomBytes + AtomOffset(row % kAtomRows, 1);
    const bool is_used = row == 0 || (row >= kAtomRows && row < kAtomRows + kUsed - 1);
    CHECK_EQ(scales[at] == 0, block < 3 && !is_used);
    CHECK_EQ(scales[at] == kUntouched, block >= 3);
    CHECK_EQ(scales[at + 1] == kUntouched, block >= 3);
  }
}

}  // namespace
}  // namespace jax_ep::host
