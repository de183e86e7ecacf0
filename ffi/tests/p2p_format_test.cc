// dispatch with token formats on the p2p kernels without JAX: rows, scales and padding of random
// cases, bit for bit against the host's encoder.
//
//   p2p_format_test RANKS DEVICES N_CASES [SEED]

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/encode.h"
#include "cpu/scales.h"
#include "tests/p2p_cases.h"

namespace jax_ep::p2p {
namespace {

// Numbers of all magnitudes, and now and then one that makes its block dead.
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
  std::vector<bool> is_row, is_scale;  // defined
  std::vector<int32_t> src_info;
  int n_dropped = 0;
};

template <class T>
class FormatCase {
 public:
  FormatCase(const Shape& shape, const FormatSpec& format, const std::vector<int>& devices,
             std::vector<std::vector<int32_t>> ids, int n_sms, std::mt19937& random,
             std::string name)
      : shape_(shape),
        format_(format),
        bed_(shape, devices, TimeoutSeconds(), n_sms),
        routing_(Unclipped(shape), std::move(ids)),
        name_(std::move(name)) {
    bed_.format = format;
    const float input_scale = random() % 2 ? 1.0f : 0.3f;
    for (int rank = 0; rank < shape.n_ranks; ++rank) {
      CHECK_CUDA(cudaSetDevice(devices[rank]));
      const int n_tokens = static_cast<int>(routing_.ids[rank].size()) / shape.top_k;
      RankBuffers<T>& b = buffers_.emplace_back(shape, n_tokens, n_tokens);
      tokens_.push_back(RandomTokens<T>(b.tokens.size(), random));
      b.tokens.Write(tokens_.back());
      b.topk_ids.Write(routing_.ids[rank]);
      b.input_scale.Write({input_scale});
      b.scales = DeviceArray<uint8_t>(
          format.scales_bytes(shape.max_recv_tokens, shape.n_local(), shape.hidden));
    }
    Encode(input_scale);
  }

  void SplitBlocks(bool receives_in_bulk) {
    bed_.dispatch_plan = {5, 3, 1, 1, 0};
    bed_.dispatch_plan.n_stages = 4;
    bed_.dispatch_plan.receives_in_bulk = receives_in_bulk ? 1 : -1;
  }

  void Run() {
    for (int rank = 0; rank < shape_.n_ranks; ++rank) {
      CHECK_CUDA(cudaSetDevice(bed_.devices[rank]));
      buffers_[rank].PoisonResults();
      buffers_[rank].scales.Poison();
      CHECK_CUDA(cudaDeviceSynchronize());
    }
    for (int rank = 0; rank < shape_.n_ranks; ++rank) {
      bed_.Launch(rank, bed_.DispatchOf(rank, buffers_[rank], false));
    }
    bed_.Sync();
    if (!bed_.IsHealthy()) return Expect(false, name_ + ": dispatch did not end");
    for (int rank = 0; rank < shape_.n_ranks; ++rank) CheckRank(rank, ExpectedOf(rank));
  }

 private:
  // The reference of unpadded rows; padding and clipping come on top.
  static Shape Unclipped(Shape shape) {
    shape.max_recv_tokens = INT32_MAX;
    return shape;
  }

  void Encode(float input_scale) {
    const Encoder encoder = FindEncoder(format_.name, RowTypeOf<T>());
    const size_t code_bytes = format_.payload_bytes(shape_.hidden);
    const size_t scale_bytes = format_.n_scales(shape_.hidden) * format_.scale_bytes;
    for (int rank = 0; rank < shape_.n_ranks; ++rank) {
      const size_t n_tokens = tokens_[rank].size() / shape_.hidden;
      std::vector<uint8_t>& codes = codes_.emplace_back(n_tokens * code_bytes);
      std::vector<uint8_t>& scales = scales_.emplace_back(n_tokens * scale_bytes);
      for (size_t token = 0; token < n_tokens; ++token) {
        encoder.encode(&tokens_[rank][token * shape_.hidden], shape_.hidden,
                       InputScale::Make(input_scale), &codes[token * code_bytes],
                       &scales[token * scale_bytes]);
      }
    }
  }

  // A placer of scales in the output, or of marks where there are any.
  Scales PlacerOf(std::vector<uint8_t>& data, const std::vector<uint32_t>& row_offsets) const {
    Scales placer;
    placer.layout = format_.layout;
    placer.n_scales = format_.n_scales(shape_.hidden);
    placer.scale_bytes = format_.scale_bytes;
    placer.data = data.data();
    placer.LayOut(row_offsets.data(), shape_.n_local());
    return placer;
  }

  Expected ExpectedOf(int rank) const {
    const int n_local = shape_.n_local(), capacity = shape_.max_recv_tokens;
    Expected e;
    e.rows.resize(capacity * format_.payload_bytes(shape_.hidden));
    e.is_row.resize(capacity);
    e.src_info.resize(2 * capacity);
    std::vector<int> begins;
    int row = 0;
    for (int expert = 0; expert < n_local; ++expert) {
      begins.push_back(row);
      e.row_offsets.push_back(std::min(row, capacity));
      row += routing_.row_offsets[rank][expert + 1] - routing_.row_offsets[rank][expert];
      row = (row + format_.row_alignment - 1) / format_.row_alignment * format_.row_alignment;
    }
    e.row_offsets.push_back(std::min(row, capacity));
    e.scales.resize(buffers_[rank].scales.size());
    e.is_scale.resize(e.scales.size());
    std::vector<uint8_t> marks(e.scales.size());
    const Scales placer = PlacerOf(e.scales, e.row_offsets);
    const Scales marker = PlacerOf(marks, e.row_offsets);
    for (int expert = 0; expert < n_local; ++expert) {
      FillGroup(rank, expert, begins[expert], placer, marker, e);
    }
    MarkScales(marks, e);
    return e;
  }

  void FillGroup(int rank, int expert, int begin, const Scales& placer, const Scales& marker,
                 Expected& e) const {
    const size_t code_bytes = format_.payload_bytes(shape_.hidden);
    const std::vector<uint8_t> ones(placer.row_bytes(), 1);
    const int capacity = shape_.max_recv_tokens;
    const int first = e.row_offsets[expert], end = e.row_offsets[expert + 1];
    const uint32_t origin = routing_.row_offsets[rank][expert];
    const int n_rows = static_cast<int>(routing_.row_offsets[rank][expert + 1] - origin);
    const int n_fit = std::clamp(capacity - begin, 0, n_rows);
    e.n_dropped += n_rows - n_fit;
    for (int i = 0; i < end - first; ++i) {
      e.is_row[first + i] = true;
      marker.Place(expert, first, i, capacity, ones.data());
      int32_t* const info = &e.src_info[2 * (first + i)];
      info[0] = info[1] = -1;
      if (i >= n_fit) continue;
      const RowOrigin& from = routing_.rows[rank][origin + i];
      std::memcpy(&e.rows[(first + i) * code_bytes], &codes_[from.source][from.token * code_bytes],
                  code_bytes);
      placer.Place(expert, first, i, capacity,
                   &scales_[from.source][from.token * placer.row_bytes()]);
      info[0] = from.token, info[1] = from.k;
    }
  }

  // In an atom that holds a scale, all bytes are defined.
  void MarkScales(const std::vector<uint8_t>& marks, Expected& e) const {
    const size_t piece = format_.layout == ScalesLayout::kAtoms ? kAtomBytes : 1;
    for (size_t i = 0; i < marks.size(); ++i) {
      if (marks[i] != 0) std::fill_n(e.is_scale.begin() + i / piece * piece, piece, true);
    }
  }

  void CheckRank(int rank, const Expected& e) {
    const RankBuffers<T>& b = buffers_[rank];
    const std::string where = name_ + ", rank " + std::to_string(rank);
    Expect(b.row_offsets.Read() == e.row_offsets, where + ": row_offsets");
    Expect(b.n_dropped.Read()[0] == e.n_dropped, where + ": n_dropped");
    const std::vector<T> rows_as_given = b.rows.Read();
    const auto* const rows = reinterpret_cast<const uint8_t*>(rows_as_given.data());
    const std::vector<int32_t> src_info = b.src_info.Read();
    const size_t code_bytes = format_.payload_bytes(shape_.hidden);
    const std::vector<uint8_t> poison(code_bytes, 0xff);
    int n_bad = 0, n_bad_info = 0, n_beyond = 0;
    for (int row = 0; row < shape_.max_recv_tokens; ++row) {
      const uint8_t* const got = rows + row * code_bytes;
      if (!e.is_row[row]) {
        n_beyond += std::memcmp(got, poison.data(), code_bytes) != 0;
        continue;
      }
      n_bad += std::memcmp(got, &e.rows[row * code_bytes], code_bytes) != 0;
      n_bad_info += std::memcmp(&src_info[2 * row], &e.src_info[2 * row], 8) != 0;
    }
    const std::string of = " of " + std::to_string(e.row_offsets.back());
    Expect(n_bad == 0, where + ": " + std::to_string(n_bad) + " bad rows" + of);
    Expect(n_bad_info == 0, where + ": " + std::to_string(n_bad_info) + " bad src_info" + of);
    Expect(n_beyond == 0, where + ": " + std::to_string(n_beyond) + " rows beyond those in use");
    const std::vector<uint8_t> scales = b.scales.Read();
    int n_bad_scales = 0, n_wild = 0;
    for (size_t i = 0; i < scales.size(); ++i) {
      n_bad_scales += e.is_scale[i] && scales[i] != e.scales[i];
      n_wild += !e.is_scale[i] && scales[i] != 0xff;
    }
    Expect(n_bad_scales == 0, where + ": " + std::to_string(n_bad_scales) + " bad bytes of scales");
    Expect(n_wild == 0, where + ": " + std::to_string(n_wild) + " bytes beyond the scales");
  }

  const Shape shape_;
  const FormatSpec format_;
  Bed<T> bed_;
  const Routing routing_;
  const std::string name_;
  std::vector<RankBuffers<T>> buffers_;
  std::vector<std::vector<T>> tokens_;
  std::vector<std::vector<uint8_t>> codes_, scales_;  // by source rank
};

FormatSpec PickFormat(std::mt19937& random) {
  FormatSpec format = kFormats[random() % std::size(kFormats)];
  if (random() % 3 == 0) {
    format.layout = ScalesLayout::kRowMajor;
    format.row_alignment = 1;
  }
  return format;
}

template <class T>
void RunFormatCase(int n_ranks, const std::vector<int>& devices, int index, std::mt19937& random) {
  const auto pick = [&](std::initializer_list<int> values) {
    return *(values.begin() + random() % values.size());
  };
  const FormatSpec format = PickFormat(random);
  Shape shape{};
  shape.n_ranks = n_ranks;
  shape.n_experts = n_ranks * pick({1, 2, 3, 8, 40});
  shape.top_k = pick({1, 2, 4, 8, 16});
  shape.hidden = std::max(format.block_size, 32) * pick({1, 2, 3, 7, 8, 33});
  shape.max_tokens = pick({1, 2, 7, 33, 64, 300});
  const auto pattern = static_cast<Pattern>(random() % kPatterns);
  std::vector<std::vector<int32_t>> ids;
  int most_rows = (format.row_alignment - 1) * shape.n_local();
  for (int rank = 0; rank < n_ranks; ++rank) {
    const int n = random() % 3 ? shape.max_tokens : random() % (shape.max_tokens + 1);
    ids.push_back(MakeIds(shape, pattern, n, random));
    most_rows += n * shape.top_k;
  }
  shape.max_recv_tokens = random() % 2 ? most_rows : 1 + random() % std::max(most_rows, 1);
  shape.max_recv_tokens = (shape.max_recv_tokens + 3) / 4 * 4;
  const int n_sms = random() % 3 == 0 ? 1 + random() % 8 : 0;
  char name[200];
  std::snprintf(
      name, sizeof(name),
      "case %d: %s layout=%d R=%d E=%d K=%d H=%d M=%d C=%d pattern=%d element=%zu n_sms=%d", index,
      format.name, static_cast<int>(format.layout), n_ranks, shape.n_experts, shape.top_k,
      shape.hidden, shape.max_tokens, shape.max_recv_tokens, static_cast<int>(pattern), sizeof(T),
      n_sms);
  FormatCase<T> one(shape, format, devices, std::move(ids), n_sms, random, name);
  one.Run();
  for (const bool receives_in_bulk : {false, true}) {
    if (n_sms != 0) break;
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
  for (int i = 0; i < n_cases && n_errors < 20; ++i) {
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
