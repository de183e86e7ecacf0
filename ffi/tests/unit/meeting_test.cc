// Tests of the meetings of ranks that share their weights; run by host_test.

#include "p2p/call/meeting.h"

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "tests/unit/check.h"

namespace jax_ep::p2p {
namespace {

// Every rank's threads run `meet(rank)`.
template <class Meet>
void OnAllRanks(size_t n_ranks, const Meet& meet) {
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < n_ranks; ++rank) threads.emplace_back([&, rank] { meet(rank); });
  for (std::thread& thread : threads) thread.join();
}

TEST(RanksLearnTheValuesOfEachMeeting) {
  constexpr size_t kRanks = 4;
  Meeting<size_t> meeting(kRanks);
  OnAllRanks(kRanks, [&](size_t rank) {
    for (size_t round = 0; round < 2000; ++round) {
      std::vector<size_t> values;
      CHECK_EQ(meeting.Meet(rank, round * kRanks + rank, 60, &values).message, "");
      for (size_t other = 0; other < kRanks; ++other) {
        CHECK_EQ(values[other], round * kRanks + other);
      }
    }
  });
}

TEST(AMeetingNamesTheRanksThatDoNotCome) {
  constexpr size_t kRanks = 4;
  Meeting<size_t> meeting(kRanks);
  OnAllRanks(2, [&](size_t rank) {
    std::vector<size_t> values;
    const double timeout_s = rank == 0 ? 1 : 60;
    const Status status = meeting.Meet(2 * rank, 0, timeout_s, &values);
    CHECK_EQ(status.code == Code::kDeadlineExceeded, true);
    CHECK_CONTAINS(status.message, "ranks 0, 2 waited 1 s for ranks 1, 3. Every");
    CHECK_EQ(values.empty(), true);
  });
  OnAllRanks(kRanks, [&](size_t rank) {  // those that come too late, and those that try again
    std::vector<size_t> values;
    const Status status = meeting.Meet(rank, 10 + rank, 60, &values);
    CHECK_EQ(status.code == Code::kDeadlineExceeded, true);
    CHECK_CONTAINS(status.message, "an earlier call failed: ranks 0, 2 waited 1 s for ranks 1, 3");
    CHECK_EQ(values.empty(), true);
  });
}

TEST(ARankIsInOneMeetingAtATime) {
  Meeting<size_t> meeting(2);
  std::atomic<int> n_refused = 0;
  const auto come = [&](size_t rank, size_t value) {
    std::vector<size_t> values;
    const Status status = meeting.Meet(rank, value, 60, &values);
    if (status.ok()) {
      CHECK_EQ(values == std::vector<size_t>({1, 2}), true);
    } else {
      CHECK_CONTAINS(status.message, "rank 0 is in another call of the group");
      ++n_refused;
    }
  };
  std::thread first(come, 0, 1), second(come, 0, 1);
  while (n_refused == 0) std::this_thread::yield();
  come(1, 2);
  first.join();
  second.join();
  CHECK_EQ(n_refused.load(), 1);
}

}  // namespace
}  // namespace jax_ep::p2p
