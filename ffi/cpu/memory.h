// Page handling for large results. They come from fresh memory, where the first touch of a page
// costs more than the copy into it. So rows are written to a few huge pages, and memory that only
// has to be zero is not touched at all.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace jax_ep {

// Asks for huge pages behind the first `used_bytes` of a buffer of `bytes`, as NumPy does for its
// arrays. This is advice to the kernel: it changes no contents, and nothing depends on it.
void AdviseHugePages(void* buffer, int64_t used_bytes, int64_t bytes);

// Zeroes memory. Long ranges of private anonymous memory are zeroed by returning their pages to the
// kernel: they then read as zero, and cost nothing until they are written.
class Zeroer {
 public:
  void Zero(void* begin, int64_t bytes);

 private:
  bool IsPrivateAnonymous(uintptr_t begin, uintptr_t end);

  bool has_ranges_ = false;
  std::vector<std::pair<uintptr_t, uintptr_t>> ranges_;  // private and anonymous, by address
};

}  // namespace jax_ep
