#include "host/memory.h"

#include <algorithm>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace jax_ep::host {

#if defined(__linux__)

namespace {

uintptr_t RoundUp(uintptr_t address, uintptr_t unit) { return (address + unit - 1) & -unit; }
uintptr_t RoundDown(uintptr_t address, uintptr_t unit) { return address & -unit; }

}  // namespace

void AdviseHugePages(void* buffer, int64_t used_bytes, int64_t bytes) {
  constexpr uintptr_t kHugePage = 2 << 20;
  const uintptr_t address = reinterpret_cast<uintptr_t>(buffer);
  const uintptr_t begin = RoundUp(address, kHugePage);
  const uintptr_t end =
      std::min(RoundUp(address + used_bytes, kHugePage), RoundDown(address + bytes, kHugePage));
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

#else

void AdviseHugePages(void*, int64_t, int64_t) {}

#endif

}  // namespace jax_ep::host
