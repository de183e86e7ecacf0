// What the ranks bring to a call, and what each of them must get, by the definition of the exchange
// alone.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/rail_exchange_job.h"

namespace jax_ep::rail {

// What a rank brings to a call.
struct Operands {
  std::vector<uint8_t> rows;    // [n_rows] or [N, n_rows]
  std::vector<uint8_t> extras;  // [n_rows], or none
  std::vector<uint8_t> mask;    // [N, n_rows], or none

  bool Sends(int to, int64_t row, int64_t n_rows) const {
    return mask.empty() || mask[to * n_rows + row] != 0;
  }
};

inline std::vector<uint8_t> RandomBytes(int64_t n, std::mt19937& random) {
  std::vector<uint8_t> bytes(n);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

inline Operands MakeOperands(const CallShape& call, int64_t n_nodes, std::mt19937& random) {
  const int64_t n_all = n_nodes * call.n_rows;
  Operands operands{RandomBytes((call.by_node ? n_all : call.n_rows) * call.row_bytes, random),
                    RandomBytes(call.n_rows * call.extra_bytes, random),
                    {}};
  if (call.mask == Mask::kAbsent) return operands;
  operands.mask.assign(n_all, call.mask == Mask::kFull);
  if (call.mask == Mask::kRandom) {
    for (uint8_t& is_sent : operands.mask) is_sent = random() % 2;
  }
  return operands;
}

// The memory that a rank gets the results of a call in.
class Results {
 public:
  Results(const CallShape& shape, const std::vector<Operands>& operands, int rank)
      : rows(NumRows(shape, operands) * shape.row_bytes, kUntouched),
        extras(NumRows(shape, operands) * shape.extra_bytes, kUntouched),
        shape_(shape),
        operands_(operands),
        rank_(rank) {}

  // What is wrong; empty: nothing.
  std::string Wrong() const {
    if (shape_.adds_up) return rows == Sums() ? "" : "sum";
    std::string wrong;
    for (int node = 0; node < n_nodes() && wrong.empty(); ++node) {
      wrong = WrongFrom(node, 0, shape_.n_rows);
    }
    return wrong;
  }
  // In the rows from `begin` to `end` of a node.
  std::string WrongFrom(int from, int64_t begin, int64_t end) const {
    const bool is_own = from == rank_, is_skipped = is_own && shape_.skips_own;
    const uint8_t unsent = shape_.fills && !is_own ? 0 : kUntouched;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t index = from * shape_.n_rows + row;
      const Operands& operands = operands_[from];
      const bool is_sent = is_own || operands.Sends(rank_, row, shape_.n_rows);
      const uint8_t* const sent =
          is_sent && !is_skipped ? Row(from, shape_.by_node ? rank_ : 0, row) : nullptr;
      if (!Has(&rows[index * shape_.row_bytes], sent, shape_.row_bytes, unsent)) return "row";
      const int64_t bytes = shape_.extra_bytes;
      const uint8_t* const extra = operands.extras.data() + row * bytes;
      if (!Has(extras.data() + index * bytes, extra, bytes, kUntouched)) return "extras";
    }
    return "";
  }

  std::vector<uint8_t> rows, extras;  // [N, n_rows], or the sums [n_rows]

 private:
  static constexpr uint8_t kUntouched = 0x5a;

  static int64_t NumRows(const CallShape& shape, const std::vector<Operands>& operands) {
    return shape.adds_up ? shape.n_rows : shape.n_rows * static_cast<int64_t>(operands.size());
  }
  // Whether `got` is what was sent, or all `unsent` if nothing was.
  static bool Has(const uint8_t* got, const uint8_t* sent, int64_t bytes, uint8_t unsent) {
    for (int64_t i = 0; i < bytes; ++i) {
      if (got[i] != (sent == nullptr ? unsent : sent[i])) return false;
    }
    return true;
  }

  int n_nodes() const { return static_cast<int>(operands_.size()); }
  const uint8_t* Row(int from, int64_t part, int64_t row) const {
    return &operands_[from].rows[(part * shape_.n_rows + row) * shape_.row_bytes];
  }
  std::vector<uint8_t> Sums() const {
    std::vector<uint8_t> sums(shape_.n_rows * shape_.row_bytes, 0);
    for (int from = 0; from < n_nodes(); ++from) {
      for (int64_t row = 0; row < shape_.n_rows; ++row) {
        if (from != rank_ && !operands_[from].Sends(rank_, row, shape_.n_rows)) continue;
        for (int64_t i = 0; i < shape_.row_bytes; ++i) {
          sums[row * shape_.row_bytes + i] += Row(from, rank_, row)[i];
        }
      }
    }
    return sums;
  }

  const CallShape& shape_;
  const std::vector<Operands>& operands_;  // [rank]
  const int rank_;
};

}  // namespace jax_ep::rail
