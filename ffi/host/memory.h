// Page handling for large results. They come from fresh memory, where the first touch of a page
// costs more than the copy into it. So rows are written to a few huge pages.
#pragma once

#include <algorithm>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace jax_ep::host {

// Asks for huge pages behind the first `used_bytes` of a buffer of `bytes`, as NumPy does for its
// arrays. This is advice to the kernel: it changes no contents, and nothing depends on it.
inline void AdviseHugePages([[maybe_unused]] void* buffer, [[maybe_unused]] int64_t used_bytes,
                            [[maybe_unused]] int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kHugePage = 2 << 20;
  const auto round_down = [](uintptr_t address) { return address & -kHugePage; };
  const auto round_up = [&](uintptr_t address) { return round_down(address + kHugePage - 1); };
  const uintptr_t address = reinterpret_cast<uintptr_t>(buffer);
  const uintptr_t begin = round_up(address);
  const uintptr_t end = std::min(round_up(address + used_bytes), round_down(address + bytes));
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace jax_ep::host
