// Large results come from fresh memory, and the first touch of each page costs more than the copy
// into it. Huge pages make that 512 times rarer.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace jax_ep {

// Asks for huge pages behind [pointer, pointer + bytes), as NumPy does for its arrays. Advice: the
// contents stay, and nothing depends on it. Too little for a huge page is left alone.
inline void AdviseHugePages(void* pointer, int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kHugePage = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(pointer) + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(pointer) + bytes) & ~(kHugePage - 1);
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace jax_ep
