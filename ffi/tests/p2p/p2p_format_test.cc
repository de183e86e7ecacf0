// Tests of dispatch with token formats, without JAX: rows, scales and padding of random cases are
// compared in bits with the host's encoder.
//
//   p2p_format_test RANKS DEVICES N_CASES [SEED]

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/formats.h"
#include "cpu/encode.h"
#include "cpu/scales.h"
#include "tests/p2p/p2p_expect.h"
#include "tests/p2p/p2p_fixture.h"
#include "tests/p2p/p2p_reference.h"
#include "tests/p2p/p2p_routings.h"

namespace jax_ep::p2p {
namespace {

// Numbers of all magnitudes; now and then a NaN or an infinity, which makes its block dead.
template <class T>
std::vector<T> RandomTokens(size_t n, std::mt19937& random) {
  std::vector<T> values(n);
  for (size_t i = 0; i < n; ++i) {
    const int exponent = i % 64 == 0 ? static_cast<int>(random() % 260) - 140 : 0;
    const float mantissa = static_cast<float>(static_cast<int32_t>(random())) * 0x1p-29f;
    values[i] = FromFloat<T>(std::ldexp(mantissa, exponent));
    if (random() % 5000 == 0) values[i] = FromFloat<T>(random() % 2 ? NAN : INFINITY);
  }
  return values;
}

// What a rank must hold after dispatch.
struct Expected {
  std::vector<uint32_t> row_offsets;
  std::vector<uint8_t> rows, scales;
  std::vector<bool> is_row, is_scale;  // which rows, and bytes of scales, are defined
  std::vector<int32_t> src_info;
  int n_dropped = 0;
};

template <class T>
class FormatCase {
 public:
  FormatCase(const CaseSizes& sizes, const RowFormat& format, const std::vector<int>& devices,
             std::vector<std::vector<int32_t>> ids, int n_sms, bool uses_lines,
             std::mt19937& random, std::string name)
      : sizes_(sizes),
        format_(format),
        fixture_(sizes, devices, TimeoutSeconds(), n_sms, format, uses_lines),
        routing_(Unclipped(sizes), std::move(ids)),
        name_(std::move(name)) {
    const float input_scale = random() % 2 ? 1.0f : 0.3f;
    fixture_.ForRanks([&](int rank) {
      const int n_tokens = routing_.n_tokens(rank);
      RankBuffers<T>& b = buffers_.emplace_back(sizes, n_tokens, n_tokens);
      tokens_.push_back(RandomTokens<T>(b.tokens.size(), random));
      b.tokens.Write(tokens_.back());
      b.group_ids.Write(routing_.ids[rank]);
      b.input_scale.Write({input_scale});
      b.scales = DeviceArray<uint8_t>(fixture_.scales_bytes());
    });
    Encode(input_scale);
  }

  void SplitBlocks(bool receives_in_bulk) {
    fixture_.dispatch_plan = {5, 3, 1, 1, 0};
    fixture_.dispatch_plan.n_stages = 4;
    fixture_.dispatch_plan.receives_in_bulk = receives_in_bulk ? 1 : -1;
  }

  void Run() {
    fixture_.ForRanks([&](int rank) {
      buffers_[rank].PoisonResults();
      buffers_[rank].scales.Poison();
      CHECK_CUDA(cudaDeviceSynchronize());
    });
    for (int rank = 0; rank < sizes_.n_ranks; ++rank) {
      fixture_.Launch(rank, fixture_.DispatchOf(rank, buffers_[rank], /*has_weights=*/false));
    }
    fixture_.Sync();
    if (!fixture_.IsHealthy()) return Expect(false, name_ + ": dispatch did not end");
    for (int rank = 0; rank < sizes_.n_ranks; ++rank) {
      const Expected expected = ExpectedOf(rank);
      CheckRows(rank, expected);
      CheckScales(rank, expected);
    }
  }

 private:
  // The reference knows rows without padding; padding and clipping are added here.
  static CaseSizes Unclipped(CaseSizes sizes) {
    sizes.max_recv_tokens = INT32_MAX;
    return sizes;
  }

  int64_t code_bytes() const { return format_.format->payload_bytes(sizes_.hidden); }
  int64_t n_scales() const { return format_.format->n_scales(sizes_.hidden); }

  void Encode(float input_scale) {
    const host::Encoder encode = host::FindEncoder(*format_.format, kRowType<T>);
    const size_t scale_bytes = n_scales() * format_.format->scale_bytes();
    for (int rank = 0; rank < sizes_.n_ranks; ++rank) {
      const size_t n_tokens = routing_.n_tokens(rank);
      std::vector<uint8_t>& codes = codes_.emplace_back(n_tokens * code_bytes());
      std::vector<uint8_t>& scales = scales_.emplace_back(n_tokens * scale_bytes);
      for (size_t token = 0; token < n_tokens; ++token) {
        encode(&tokens_[rank][token * sizes_.hidden], sizes_.hidden, InputScale::Make(input_scale),
               &codes[token * code_bytes()], &scales[token * scale_bytes]);
      }
    }
  }

  // Places scales in `data`.
  host::Scales PlacerOf(std::vector<uint8_t>& data,
                        const std::vector<uint32_t>& row_offsets) const {
    host::Scales placer;
    placer.layout = format_.scales_layout;
    placer.n_scales = n_scales();
    placer.scale_bytes = format_.format->scale_bytes();
    placer.data = data.data();
    placer.LayOut(row_offsets.data(), sizes_.n_local_groups());
    return placer;
  }

  Expected ExpectedOf(int rank) const {
    const int n_local_groups = sizes_.n_local_groups(), capacity = sizes_.max_recv_tokens;
    const int alignment = fixture_.row_alignment();
    Expected e;
    e.rows.resize(capacity * code_bytes());
    e.is_row.resize(capacity);
    e.src_info.resize(2 * capacity);
    std::vector<int> begins;
    int row = 0;
    for (int group = 0; group < n_local_groups; ++group) {
      begins.push_back(row);
      e.row_offsets.push_back(std::min(row, capacity));
      row += routing_.row_offsets[rank][group + 1] - routing_.row_offsets[rank][group];
      row = (row + alignment - 1) / alignment * alignment;
    }
    e.row_offsets.push_back(std::min(row, capacity));
    e.scales.resize(buffers_[rank].scales.size());
    e.is_scale.resize(e.scales.size());
    std::vector<uint8_t> marks(e.scales.size());  // nonzero: a scale was placed here
    const host::Scales placer = PlacerOf(e.scales, e.row_offsets);
    const host::Scales marker = PlacerOf(marks, e.row_offsets);
    for (int group = 0; group < n_local_groups; ++group) {
      FillGroup(rank, group, begins[group], placer, marker, e);
    }
    MarkScales(marks, e);
    return e;
  }

  void FillGroup(int rank, int group, int begin, const host::Scales& placer,
                 const host::Scales& marker, Expected& e) const {
    const std::vector<uint8_t> ones(placer.row_bytes(), 1);
    const int capacity = sizes_.max_recv_tokens;
    const int first = e.row_offsets[group], end = e.row_offsets[group + 1];
    const uint32_t origin = routing_.row_offsets[rank][group];
    const int n_rows = static_cast<int>(routing_.row_offsets[rank][group + 1] - origin);
    const int n_fit = std::clamp(capacity - begin, 0, n_rows);
    e.n_dropped += n_rows - n_fit;
    for (int i = 0; i < end - first; ++i) {
      e.is_row[first + i] = true;
      marker.Place(group, first, i, capacity, ones.data());
      int32_t* const info = &e.src_info[2 * (first + i)];
      info[0] = info[1] = -1;
      if (i >= n_fit) continue;
      const RowOrigin& from = routing_.rows[rank][origin + i];
      std::memcpy(&e.rows[(first + i) * code_bytes()],
                  &codes_[from.source][from.token * code_bytes()], code_bytes());
      placer.Place(group, first, i, capacity,
                   &scales_[from.source][from.token * placer.row_bytes()]);
      info[0] = from.token, info[1] = from.k;
    }
  }

  // If an atom holds a scale, all its bytes are defined.
  void MarkScales(const std::vector<uint8_t>& marks, Expected& e) const {
    const size_t piece = format_.scales_layout == ScalesLayout::kAtoms ? kAtomBytes : 1;
    for (size_t i = 0; i < marks.size(); ++i) {
      if (marks[i] != 0) std::fill_n(e.is_scale.begin() + i / piece * piece, piece, true);
    }
  }

  std::string Where(int rank) const { return name_ + ", rank " + std::to_string(rank); }

  void CheckRows(int rank, const Expected& e) {
    const RankBuffers<T>& b = buffers_[rank];
    const std::string where = Where(rank);
    Expect(b.row_offsets.Read() == e.row_offsets, where + ": row_offsets");
    Expect(b.n_dropped.Read()[0] == e.n_dropped, where + ": n_dropped");
    const std::vector<T> rows_as_given = b.rows.Read();
    const auto* const rows = reinterpret_cast<const uint8_t*>(rows_as_given.data());
    const std::vector<int32_t> src_info = b.src_info.Read();
    const std::vector<uint8_t> poison(code_bytes(), 0xff);
    int n_bad = 0, n_bad_info = 0, n_beyond = 0;
    for (int row = 0; row < sizes_.max_recv_tokens; ++row) {
      const uint8_t* const got = rows + row * code_bytes();
      if (!e.is_row[row]) {
        n_beyond += std::memcmp(got, poison.data(), code_bytes()) != 0;
        continue;
      }
      n_bad += std::memcmp(got, &e.rows[row * code_bytes()], code_bytes()) != 0;
      n_bad_info += std::memcmp(&src_info[2 * row], &e.src_info[2 * row], 8) != 0;
    }
    const std::string of = " of " + std::to_string(e.row_offsets.back());
    Expect(n_bad == 0, where + ": " + std::to_string(n_bad) + " bad rows" + of);
    Expect(n_bad_info == 0, where + ": " + std::to_string(n_bad_info) + " bad src_info" + of);
    Expect(n_beyond == 0, where + ": " + std::to_string(n_beyond) + " rows beyond those in use");
  }

  void CheckScales(int rank, const Expected& e) {
    const std::vector<uint8_t> scales = buffers_[rank].scales.Read();
    int n_bad = 0, n_beyond = 0;
    for (size_t i = 0; i < scales.size(); ++i) {
      n_bad += e.is_scale[i] && scales[i] != e.scales[i];
      n_beyond += !e.is_scale[i] && scales[i] != 0xff;
    }
    Expect(n_bad == 0, Where(rank) + ": " + std::to_string(n_bad) + " bad bytes of scales");
    Expect(n_beyond == 0,
           Where(rank) + ": " + std::to_string(n_beyond) + " bytes beyond the scales");
  }

  const CaseSizes sizes_;
  const RowFormat format_;
  Fixture<T> fixture_;
  const Routing routing_;
  const std::string name_;
  std::vector<RankBuffers<T>> buffers_;
  std::vector<std::vector<T>> tokens_;
  std::vector<std::vector<uint8_t>> codes_, scales_;  // by source rank
};

// A format that quantizes, mostly in its default layout.
RowFormat PickFormat(std::mt19937& random) {
  std::vector<const TokenFormat*> formats;
  for (const TokenFormat& format : kTokenFormats) {
    if (!format.is_plain()) formats.push_back(&format);
  }
  const TokenFormat* const format = formats[random() % formats.size()];
  return {format, random() % 3 == 0 ? ScalesLayout::kRowMajor : format->layouts[0]};
}

template <class T>
void RunFormatCase(int n_ranks, const std::vector<int>& devices, int index, std::mt19937& random) {
  const auto pick = [&](std::initializer_list<int> values) {
    return *(values.begin() + random() % values.size());
  };
  const RowFormat format = PickFormat(random);
  CaseSizes sizes{};
  sizes.n_ranks = n_ranks;
  sizes.n_groups = n_ranks * pick({1, 2, 3, 8, 40});
  sizes.n_choices = pick({1, 2, 4, 8, 16});
  sizes.hidden = std::max(format.format->block_size, 32) * pick({1, 2, 3, 7, 8, 33});
  sizes.max_tokens = pick({1, 2, 7, 32, 64, 300});
  const auto pattern = static_cast<Pattern>(random() % kPatterns);
  const int alignment = static_cast<int>(format.format->row_alignment(format.scales_layout));
  std::vector<std::vector<int32_t>> ids;
  int max_rows = (alignment - 1) * sizes.n_local_groups();
  const bool is_ragged = random() % 2;  // ranks have different numbers of tokens
  const bool uses_lines = !is_ragged && random() % 3;
  for (int rank = 0; rank < n_ranks; ++rank) {
    const int n = is_ragged ? random() % (sizes.max_tokens + 1) : sizes.max_tokens;
    ids.push_back(MakeIds(sizes, pattern, n, random));
    max_rows += n * sizes.n_choices;
  }
  sizes.max_recv_tokens = random() % 2 ? max_rows : 1 + random() % std::max(max_rows, 1);
  sizes.max_recv_tokens = (sizes.max_recv_tokens + 3) / 4 * 4;
  const int n_sms = random() % 3 == 0 ? 1 + random() % 8 : 0;
  char name[200];
  std::snprintf(
      name, sizeof(name),
      "case %d: %s layout=%d R=%d G=%d N=%d H=%d M=%d C=%d pattern=%d element=%zu n_sms=%d "
      "lines=%d",
      index, format.format->name.data(), static_cast<int>(format.scales_layout), n_ranks,
      sizes.n_groups, sizes.n_choices, sizes.hidden, sizes.max_tokens, sizes.max_recv_tokens,
      static_cast<int>(pattern), sizeof(T), n_sms, uses_lines);
  FormatCase<T> one(sizes, format, devices, std::move(ids), n_sms, uses_lines, random, name);
  one.Run();
  for (const bool receives_in_bulk : {false, true}) {
    if (n_sms != 0 || uses_lines) break;
    one.SplitBlocks(receives_in_bulk);
    one.Run();
  }
}

int Main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: p2p_format_test RANKS DEVICES N_CASES [SEED]\n");
    return 2;
  }
  const int n_ranks = std::atoi(argv[1]), n_cases = std::atoi(argv[3]);
  const std::vector<int> devices = Spread(n_ranks, std::atoi(argv[2]));
  const unsigned seed = argc > 4 ? std::atoi(argv[4]) : 1;
  for (int i = 0; i < n_cases && n_errors < kMaxPrintedErrors; ++i) {
    std::mt19937 random(seed + i);
    if (random() % 3 == 0) {
      RunFormatCase<float>(n_ranks, devices, i, random);
    } else {
      RunFormatCase<BFloat16>(n_ranks, devices, i, random);
    }
  }
  std::printf("formats: R=%d, %d cases from seed %u, %d errors\n", n_ranks, n_cases, seed,
              n_errors);
  return n_errors == 0 ? 0 : 1;
}

}  // namespace
}  // namespace jax_ep::p2p

int main(int argc, char** argv) { return jax_ep::p2p::Main(argc, argv); }
