// Tests of the list of symmetric heaps, which threads share; run by host_test, also under
// ThreadSanitizer.

#include "nvshmem/world/heap_list.h"

#include <atomic>
#include <set>
#include <thread>
#include <vector>

#include "tests/unit/check.h"

namespace jax_ep::rail {
namespace {

// A heap that says what it is in all of its plain fields.
Heap Marked(size_t mark) { return {reinterpret_cast<uint8_t*>(mark), mark, nullptr, nullptr}; }

bool IsWhole(const Heap& heap) { return reinterpret_cast<size_t>(heap.base) == heap.bytes; }

TEST(HeapsAreNumberedInOrder) {
  HeapList heaps;
  CHECK_EQ(heaps.Add(Marked(7)), size_t{0});
  CHECK_EQ(heaps.Add(Marked(9)), size_t{1});
  CHECK_EQ(heaps.Get(0).bytes, size_t{7});
  CHECK_EQ(heaps.Get(1).bytes, size_t{9});
}

// As when an allocation ends after its time limit, while another group closes.
TEST(HeapsAreReadWhileOthersAreAdded) {
  constexpr size_t kPerThread = 2000;
  HeapList heaps;
  heaps.Add(Marked(1));
  std::atomic<bool> ended{false};
  std::atomic<int64_t> n_torn{0};
  std::vector<size_t> numbers[2];
  std::thread reader([&] {
    while (!ended) {
      const Heap first = heaps.Get(0);
      if (!IsWhole(first) || first.bytes != 1) ++n_torn;
    }
  });
  std::vector<std::thread> writers;
  for (std::vector<size_t>& own : numbers) {
    writers.emplace_back([&] {
      for (size_t i = 0; i < kPerThread; ++i) {
        const size_t mark = reinterpret_cast<size_t>(&own) + i;
        own.push_back(heaps.Add(Marked(mark)));
        const Heap added = heaps.Get(own.back());
        if (!IsWhole(added) || added.bytes != mark) ++n_torn;
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  ended = true;
  reader.join();
  CHECK_EQ(n_torn.load(), 0);
  std::set<size_t> all;
  for (const std::vector<size_t>& own : numbers) all.insert(own.begin(), own.end());
  CHECK_EQ(all.size(), 2 * kPerThread);
  CHECK_EQ(*all.rbegin(), 2 * kPerThread);
}

}  // namespace
}  // namespace jax_ep::rail
