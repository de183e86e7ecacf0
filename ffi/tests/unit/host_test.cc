// The host transport without XLA and Python, threads included. Runs under the sanitizers, too.

#include <atomic>
#include <cstring>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/float_types.h"
#include "core/routing.h"
#include "host/group.h"
#include "host/parallel.h"
#include "host/rendezvous.h"
#include "tests/unit/check.h"
#include "tests/unit/thread_pool.h"

namespace jax_ep::host {
namespace {

TEST(ParallelForCallsEachChunkOnce) {
  TestPool threads(3);
  for (int64_t n_chunks : {0, 1, 2, 1000}) {
    std::vector<std::atomic<int>> calls(n_chunks);
    ParallelFor(threads.pool(), n_chunks, [&](int64_t chunk) { ++calls[chunk]; });
    for (const auto& count : calls) CHECK_EQ(count.load(), 1);
  }
}

// Whether the caller or a helper throws, the caller gets it once no chunk runs any more.
TEST(ParallelForRethrowsOnTheCaller) {
  TestPool threads(3);
  for (const int64_t thrower : {0, 7, 99}) {
    std::atomic<int> running{0};
    std::string caught;
    try {
      ParallelFor(threads.pool(), 100, [&](int64_t chunk) {
        ++running;
        std::this_thread::yield();
        --running;
        if (chunk == thrower) throw std::runtime_error("chunk " + std::to_string(chunk));
      });
    } catch (const std::runtime_error& error) {
      caught = error.what();
    }
    CHECK_EQ(running.load(), 0);
    CHECK_EQ(caught, "chunk " + std::to_string(thrower));
  }
}

TEST(ParallelForDoesWithoutHelpers) {
  const Pool pool{[](const std::function<void()>&) { throw std::bad_alloc(); }, /*n_threads=*/4};
  int n_calls = 0;
  ParallelFor(pool, 10, [&](int64_t) { ++n_calls; });
  CHECK_EQ(n_calls, 10);
}

TEST(HalfPrecisionRoundsToNearestEven) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Float16 half{static_cast<uint16_t>(bits)};
    const BFloat16 brain{static_cast<uint16_t>(bits)};
    const bool half_is_nan = (bits & 0x7fff) > 0x7c00;
    const bool brain_is_nan = (bits & 0x7fff) > 0x7f80;
    if (!half_is_nan) CHECK_EQ(FromFloat<Float16>(ToFloat(half)).bits, half.bits);
    if (!brain_is_nan) CHECK_EQ(FromFloat<BFloat16>(ToFloat(brain)).bits, brain.bits);
  }
  CHECK_EQ(FromFloat<Float16>(0x1p-25f).bits, 0);         // a tie, to even
  CHECK_EQ(FromFloat<Float16>(0x1.8p-24f).bits, 2);       // a tie, to even
  CHECK_EQ(FromFloat<Float16>(65520.0f).bits, 0x7c00);    // a tie, to infinity
  CHECK_EQ(FromFloat<BFloat16>(0x1.01p0f).bits, 0x3f80);  // a tie, to even
  CHECK_EQ(FromFloat<BFloat16>(0x1.03p0f).bits, 0x3f82);  // a tie, to even
  CHECK_EQ(FromFloat<BFloat16>(FloatFromBits(0x7f800001)).bits & 0x7f80, 0x7f80);  // NaN stays NaN
  CHECK_EQ((FromFloat<BFloat16>(FloatFromBits(0x7f800001)).bits & 0x7f) != 0, true);
}

TEST(RowsBeyondCapacityAreDropped) {
  uint32_t row_offsets[3];
  int64_t first_row[4], n_rows[2];
  const int64_t counts[2][2] = {{3, 2}, {4, 1}};  // [source][local group]
  const int64_t n_dropped =
      ComputeRowOffsets([&](int64_t source, int64_t group) { return counts[source][group]; },
                        /*n_local_groups=*/2, /*n_ranks=*/2, /*max_recv_tokens=*/8,
                        /*row_alignment=*/1, first_row, n_rows, row_offsets);
  CHECK_EQ(n_dropped, 2);
  const uint32_t expected_offsets[] = {0, 7, 8};
  const int64_t expected_first[] = {0, 3, 7, 9};
  for (int i = 0; i < 3; ++i) CHECK_EQ(row_offsets[i], expected_offsets[i]);
  for (int i = 0; i < 4; ++i) CHECK_EQ(first_row[i], expected_first[i]);
}

// Three groups of rows, each from two nodes: padding follows the rows of the second node only.
TEST(RowsFromSeveralNodesArePaddedAsOne) {
  uint32_t row_offsets[7];
  int64_t first_row[6], n_rows[6];
  const int64_t counts[6] = {3, 2, 0, 0, 1, 4};  // [local group]
  const int64_t n_dropped = ComputeRowOffsets(
      [&](int64_t, int64_t group) { return counts[group]; }, /*n_local_groups=*/6, /*n_ranks=*/1,
      /*max_recv_tokens=*/12, /*row_alignment=*/4, first_row, n_rows, row_offsets,
      /*n_source_nodes=*/2);
  CHECK_EQ(n_dropped, 1);
  const uint32_t expected_offsets[] = {0, 3, 8, 8, 8, 9, 12};
  const int64_t expected_rows[] = {3, 2, 0, 0, 1, 3};
  for (int i = 0; i < 7; ++i) CHECK_EQ(row_offsets[i], expected_offsets[i]);
  for (int i = 0; i < 6; ++i) CHECK_EQ(n_rows[i], expected_rows[i]);
}

TEST(NodesHaveTheUsersRanks) {
  GroupSizes sizes{/*n_ranks=*/2, /*n_groups=*/12, 1, 1};
  sizes.n_source_nodes = 3;
  const HostGroup group({sizes, 2, 1, 1, 1}, {});
  const MeshCoordinate user = group.OfUser({/*replica=*/5, /*rank=*/1});  // node 2 of replica 1
  CHECK_EQ(user.replica, 1);
  CHECK_EQ(user.rank, 5);
}

TEST(ContradictorySizesAreRefused) {
  const GroupSizes sizes{/*n_ranks=*/3, /*n_groups=*/8, 1, 1};
  CHECK_CONTAINS(HostGroups::Instance().Open("odd", {sizes, 1, 1, 1, 1}, {}).message,
                 "got n_groups=8, n_ranks=3");
  GroupSizes of_nodes{/*n_ranks=*/1, /*n_groups=*/8, 1, 1};
  of_nodes.n_source_nodes = 3;
  CHECK_CONTAINS(HostGroups::Instance().Open("odd", {of_nodes, 1, 1, 1, 1}, {}).message,
                 "got 8 groups, n_source_nodes=3");
}

#ifdef JAX_EP_SEEDED_FAULT
// The sanitizer must report it, which proves that the sanitizer is at work.
void CommitSeededFault() {
  int shared = 0;
  std::thread first([&] { ++shared; });
  std::thread second([&] { ++shared; });
  first.join();
  second.join();
  std::vector<int> four(4);
  volatile int index = 4;
  four.data()[index] = shared;
}
#endif

}  // namespace
}  // namespace jax_ep::host

int main() {
  using namespace jax_ep::host;
#ifdef JAX_EP_SEEDED_FAULT
  CommitSeededFault();
#endif
  Rendezvous::Instance().StartWatchdog();
  CompletionThreads::Instance().Reserve(1);
  return jax_ep::RunTests("host_test");
}
