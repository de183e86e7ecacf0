// Large results come from fresh memory, and the first touch of each page costs more than the copy
// into it. Huge pages make that 512 times rarer.
#pragma once

#include <algorithm>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace jax_ep {

// Asks for huge pages behind the first `used_bytes` of a buffer of `bytes`, as NumPy does for its
// arrays. Advice: the contents stay, and nothing depends on it.
inline void AdviseHugePages(void* buffer, int64_t used_bytes, int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kHugePage = 2 << 20;
  const auto round_up = [](uintptr_t address) { return (address + kHugePage - 1) & -kHugePage; };
  const uintptr_t address = reinterpret_cast<uintptr_t>(buffer);
  const uintptr_t begin = round_up(address);
  const uintptr_t end = std::min(round_up(address + used_bytes), (address + bytes) & -kHugePage);
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace jax_ep
