// Large results come from fresh memory, and the first touch of each page costs more than the copy
// into it. So: few large pages where rows are written, and none where they are only to be zero.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace jax_ep {

// Asks for huge pages behind the first `used_bytes` of a buffer of `bytes`, as NumPy does for its
// arrays. Advice: the contents stay, and nothing depends on it.
void AdviseHugePages(void* buffer, int64_t used_bytes, int64_t bytes);

// Zeroes memory. Where that is long, and memory of this process alone that no file stands behind,
// by giving its pages back: they read as zero then, and cost nothing until somebody writes to them.
class Zeroer {
 public:
  void Zero(void* begin, int64_t bytes);

 private:
  bool IsPrivateAnonymous(uintptr_t begin, uintptr_t end);

  bool has_ranges_ = false;
  std::vector<std::pair<uintptr_t, uintptr_t>> ranges_;  // private and anonymous, by address
};

}  // namespace jax_ep
