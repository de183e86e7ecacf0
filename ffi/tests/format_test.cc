#include "tests/format_test.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "core/e2m1.h"
#include "core/quantize.h"
#include "core/routing.h"
#include "cpu/dispatch.h"
#include "cpu/encode.h"
#include "cpu/scales.h"
#include "cpu/silu.h"
#include "tests/check.h"
#include "tests/thread_pool.h"

namespace jax_ep {
namespace {

void TestGroupsArePaddedAndCutAtTheCapacity() {
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

void TestEveryCodeIsItsOwnNearest() {
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

// One rank's buffers; every token goes to both experts of the next rank.
struct Sender {
  Sender(const EpConfig& config, std::shared_ptr<HostGroup> group, int64_t rank)
      : tokens(config.max_tokens_per_rank * config.hidden_size),
        topk_ids(config.max_tokens_per_rank * config.top_k),
        rows(config.max_recv_tokens * config.payload_bytes, 0xff),
        row_offsets(config.n_local_experts() + 1),
        src_info(config.max_recv_tokens * 2),
        dst_rows(topk_ids.size()) {
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = std::sin(static_cast<float>(i + rank));
    for (size_t i = 0; i < topk_ids.size(); ++i) {
      topk_ids[i] = static_cast<int32_t>(((rank + 1) * 2 + static_cast<int64_t>(i) % 2) % 4);
    }
    args = std::make_unique<DispatchArgs>();
    args->config = config;
    args->n_tokens = config.max_tokens_per_rank;
    args->device = *group->Find(rank);
    args->group = std::move(group);
    args->token_bytes = config.hidden_size * static_cast<int64_t>(sizeof(float));
    args->row_bytes = config.payload_bytes;
    args->encoder = FindEncoder(config.token_format, RowType::kFloat32);
    args->input_scale = InputScale::Make(1.0f);
    args->scales.layout = ScalesLayout::kAtoms;
    args->scales.n_scales = config.n_scales;
    args->scales.scale_bytes = args->encoder.scale_bytes;
    int64_t n_scale_bytes = 1;
    for (int64_t size : args->scales.Shape(config.max_recv_tokens, 2)) n_scale_bytes *= size;
    scales.assign(n_scale_bytes, 0xff);
    args->scales.data = scales.data();
    args->tokens = reinterpret_cast<const uint8_t*>(tokens.data());
    args->topk_ids = topk_ids.data();
    args->rows = rows.data();
    args->row_offsets = row_offsets.data();
    args->src_info = src_info.data();
    args->n_dropped = &n_dropped;
    args->n_invalid = &n_invalid;
    args->dst_rows = dst_rows.data();
    CountOwnChoices(*args);
  }

  std::vector<float> tokens;
  std::vector<int32_t> topk_ids;
  std::vector<uint8_t> rows, scales;
  std::vector<uint32_t> row_offsets;
  std::vector<int32_t> src_info, dst_rows;
  int32_t n_dropped = 0, n_invalid = 0;
  std::unique_ptr<DispatchArgs> args;
};

// Where the rows of one expert must stand, computed here once more.
void CheckRows(const Sender& from, const Sender& to, const EpConfig& config, int64_t expert) {
  const int64_t n_tokens = config.max_tokens_per_rank, n_atoms = (config.n_scales + 3) / 4;
  std::vector<uint8_t> codes(config.payload_bytes), scales(config.n_scales);
  for (int64_t row = 0; row < (n_tokens + 127) / 128 * 128; ++row) {
    const bool is_used = row < n_tokens;
    if (is_used) {
      FindEncoder(config.token_format, RowType::kFloat32)
          .encode(from.tokens.data() + row * config.hidden_size, config.hidden_size,
                  InputScale::Make(1.0f), codes.data(), scales.data());
      const uint8_t* const got = to.rows.data() + (expert * n_tokens + row) * config.payload_bytes;
      CHECK_EQ(std::memcmp(got, codes.data(), codes.size()), 0);
    }
    const int64_t block = expert * ((n_tokens + 127) / 128) + row / 128;
    for (int64_t c = 0; c < n_atoms * 4; ++c) {
      const int64_t at = ((block * n_atoms + c / 4) * 32 + row % 32) * 16 + row % 128 / 32 * 4;
      const bool is_scale = is_used && c < config.n_scales;
      CHECK_EQ(static_cast<int>(to.scales[at + c % 4]), is_scale ? static_cast<int>(scales[c]) : 0);
    }
  }
}

void TestRowsAreQuantisedOnTheWay() {
  EpConfig config{};
  config.n_ranks = 2;
  config.n_experts = 4;
  config.top_k = 2;
  config.hidden_size = 16 * 13;
  config.max_tokens_per_rank = 150;
  config.max_recv_tokens = 2 * config.max_tokens_per_rank;
  config.token_format = "nvfp4";
  config.payload_bytes = config.hidden_size / 2;
  config.n_scales = 13;
  config.row_alignment = 1;
  auto group = std::make_shared<HostGroup>(2, 4, /*token_bytes=*/1,
                                           std::vector<Device>{{0, 0, 0}, {1, 0, 1}});
  Sender ranks[] = {{config, group, 0}, {config, group, 1}};
  std::vector<Arrival> arrivals;
  for (Sender& rank : ranks) {
    arrivals.push_back({rank.args->device.rank, std::move(rank.args), [](const Status&) {}});
  }
  TestPool threads(3);
  DispatchAll(threads.pool(), arrivals);
  for (int64_t expert : {0, 1}) {
    CheckRows(ranks[0], ranks[1], config, expert);
    CheckRows(ranks[1], ranks[0], config, expert);
  }
}

void CheckCodes(uint32_t word, const float (&values)[8]) {
  for (int i = 0; i < 8; ++i) CHECK_EQ(word >> 4 * i & 15, uint32_t{ToE2m1(values[i])});
}

// The kernels' conversions of eight numbers at once, on the host: every exponent, both signs, and
// fractions around the middles between codes.
void TestWordsOfE2m1AreThoseOfOneByOne() {
  for (uint32_t top = 0; top < 1 << 12; ++top) {
    if ((top >> 3 & 0xff) == 0xff) continue;  // infinity and NaN
    float values[8];
    for (uint32_t i = 0; i < 8; ++i) values[i] = FloatFromBits(top << 20 | (i - 4) % (1u << 20));
    float largest = 0, scaled[8];
    for (const float value : values) largest = std::max(largest, std::fabs(value));
    if (largest < 7) CheckCodes(ToE2m1Word(values), values);
    // As a block of MXFP4, with larger elements and without.
    for (int binades = 0; binades < 6; ++binades) {
      const float amax = std::ldexp(largest, binades);
      const auto block = MxFp4::EncodeScale(amax, {});
      if (!MxFp4::IsUsual(amax, block)) continue;
      for (int i = 0; i < 8; ++i) scaled[i] = MxFp4::ScaleElement(values[i], block.factor);
      CheckCodes(ToMxFp4Word(values, block), scaled);
    }
  }
}

// How many magnitudes of [first, end), as bits of float32, are those of usual blocks; their scales
// are those of any block.
template <class Format>
int CountUsual(uint32_t first, uint32_t end, float input_scale) {
  const InputScale global = InputScale::Make(input_scale);
  int n_usual = 0;
  for (uint32_t bits = first; bits < end; bits += 1009) {
    const float amax = FloatFromBits(bits);
    const auto got = Format::EncodeUsualScale(amax, global);
    if (!Format::IsUsual(amax, got)) continue;
    ++n_usual;
    const auto wanted = Format::EncodeScale(amax, global);
    CHECK_EQ(got.scale, wanted.scale);
    CHECK_EQ(FloatBits(got.factor), FloatBits(wanted.factor));
  }
  return n_usual;
}

void TestScalesOfUsualBlocksAreThoseOfAny() {
  const uint32_t small = FloatBits(0.001f), large = FloatBits(1e4f);
  for (const float input_scale : {1.0f, 0.3f}) {
    for (const auto count : {CountUsual<BlockwiseFp8>, CountUsual<MxFp8>, CountUsual<MxFp4>}) {
      CHECK_EQ(count(small, large, input_scale), static_cast<int>((large - small) / 1009 + 1));
      count(0, 0x80000000u - 1009, input_scale);
      // Zero, infinity and NaN are not usual.
      CHECK_EQ(count(0, 1, input_scale), 0);
      CHECK_EQ(count(kFloatInfinity, 0x80000000u - 1009, input_scale), 0);
    }
    CHECK_EQ(CountUsual<NvFp4>(0, 0x80000000u - 1009, input_scale) > 0, true);
    CHECK_EQ(CountUsual<NvFp4>(kFloatInfinity, 0x80000000u - 1009, input_scale), 0);
  }
}

void TestActivationTouchesRowsInUseAlone() {
  constexpr int64_t kRows = 200, kRowSize = 32, kUsed = 131;
  constexpr uint8_t kUntouched = 0xee;
  const std::vector<float> x(kRows * 2 * kRowSize, 1.0f);
  const std::vector<uint32_t> row_offsets = {0, 1, kUsed};
  std::vector<uint8_t> out(kRows * kRowSize, kUntouched);
  SiluCall call{};
  call.token_format = "mxfp8";
  call.scales_layout = ScalesLayout::kAtoms;
  call.n_rows = kRows;
  call.n_groups = 2;
  call.row_size = kRowSize;
  call.n_scales = 1;
  call.x_type = RowType::kFloat32;
  call.x = x.data();
  call.row_offsets = row_offsets.data();
  call.out = out.data();
  std::vector<uint8_t> scales(MaxBlocks(kRows, 2) * kAtomBytes, kUntouched);
  call.scales = scales.data();
  TestPool threads(3);
  CHECK_EQ(FusedSilu(threads.pool(), call).message, "");
  for (int64_t i = 0; i < kRows * kRowSize; ++i) {
    CHECK_EQ(out[i] == kUntouched, i >= kUsed * kRowSize);
  }
  // One row in a block of the first group, 130 in two of the second.
  for (int64_t row = 0; row < static_cast<int64_t>(scales.size()) / kAtomScales; ++row) {
    const int64_t block = row / kAtomRows, at = block * kAtomBytes + AtomOffset(row % kAtomRows, 1);
    const bool is_used = row == 0 || (row >= kAtomRows && row < kAtomRows + kUsed - 1);
    CHECK_EQ(scales[at] == 0, block < 3 && !is_used);
    CHECK_EQ(scales[at] == kUntouched, block >= 3);
    CHECK_EQ(scales[at + 1] == kUntouched, block >= 3);
  }
}

}  // namespace

void RunFormatTests() {
  TestGroupsArePaddedAndCutAtTheCapacity();
  TestEveryCodeIsItsOwnNearest();
  TestRowsAreQuantisedOnTheWay();
  TestWordsOfE2m1AreThoseOfOneByOne();
  TestScalesOfUsualBlocksAreThoseOfAny();
  TestActivationTouchesRowsInUseAlone();
}

}  // namespace jax_ep
