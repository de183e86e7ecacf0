#include "cpu/memory.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace jax_ep {

#if defined(__linux__)

namespace {

using Ranges = std::vector<std::pair<uintptr_t, uintptr_t>>;

uintptr_t RoundUp(uintptr_t address, uintptr_t unit) { return (address + unit - 1) & -unit; }
uintptr_t RoundDown(uintptr_t address, uintptr_t unit) { return address & -unit; }

// Adjacent ranges are merged. A line of the file is "begin-end perms offset device inode path".
Ranges ReadPrivateAnonymousRanges() {
  Ranges ranges;
  std::FILE* const maps = std::fopen("/proc/self/maps", "r");
  if (maps == nullptr) return ranges;
  char line[512];
  while (std::fgets(line, sizeof(line), maps) != nullptr) {
    unsigned long begin, end, inode;
    char permissions[5];
    if (std::sscanf(line, "%lx-%lx %4s %*x %*s %lu", &begin, &end, permissions, &inode) != 4) {
      continue;
    }
    if (permissions[3] != 'p' || inode != 0) continue;
    if (!ranges.empty() && ranges.back().second == begin) {
      ranges.back().second = end;
    } else {
      ranges.emplace_back(begin, end);
    }
  }
  std::fclose(maps);
  return ranges;
}

}  // namespace

void AdviseHugePages(void* buffer, int64_t used_bytes, int64_t bytes) {
  constexpr uintptr_t kHugePage = 2 << 20;
  const uintptr_t address = reinterpret_cast<uintptr_t>(buffer);
  const uintptr_t begin = RoundUp(address, kHugePage);
  const uintptr_t end =
      std::min(RoundUp(address + used_bytes, kHugePage), RoundDown(address + bytes, kHugePage));
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

void Zeroer::Zero(void* begin, int64_t bytes) {
  // For shorter ranges the system call takes longer than the stores.
  constexpr int64_t kMinBytes = 16 << 20;
  static const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first = reinterpret_cast<uintptr_t>(begin), last = first + bytes;
  const uintptr_t first_page = RoundUp(first, page), last_page = RoundDown(last, page);
  const bool gives_back =
      bytes >= kMinBytes && IsPrivateAnonymous(first_page, last_page) &&
      madvise(reinterpret_cast<void*>(first_page), last_page - first_page, MADV_DONTNEED) == 0;
  if (!gives_back) {
    std::memset(begin, 0, bytes);
    return;
  }
  std::memset(begin, 0, first_page - first);
  std::memset(reinterpret_cast<void*>(last_page), 0, last - last_page);
}

bool Zeroer::IsPrivateAnonymous(uintptr_t begin, uintptr_t end) {
  if (!has_ranges_) ranges_ = ReadPrivateAnonymousRanges();
  has_ranges_ = true;
  return std::any_of(ranges_.begin(), ranges_.end(), [&](const auto& range) {
    return range.first <= begin && end <= range.second;
  });
}

#else

void AdviseHugePages(void*, int64_t, int64_t) {}

void Zeroer::Zero(void* begin, int64_t bytes) { std::memset(begin, 0, bytes); }

#endif

}  // namespace jax_ep
