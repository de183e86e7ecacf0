// Tests of the rendezvous of ranks, run by host_test.

#include "host/rendezvous.h"

#include <chrono>
#include <future>
#include <memory>
#include <utility>
#include <vector>

#include "tests/unit/check.h"
#include "tests/unit/promised_completion.h"

namespace jax_ep::host {
namespace {

Arrival MakeArrival(int64_t rank, std::promise<Status>& promise) {
  return {rank, std::make_unique<RankArgs>(), CompletionOf(promise)};
}

Failure FailureOf(const char* message) { return std::make_shared<const Status>(Internal(message)); }

CallInfo MakeInfo(int64_t n_ranks, double timeout_s) {
  return {"test", n_ranks, timeout_s, /*late_hint=*/" Is it late?"};
}

TEST(LastRankGetsAllByRank) {
  Rendezvous& rendezvous = Rendezvous::Instance();
  std::promise<Status> promises[3];
  int site;
  const CallKey key{&site, 1, 0};
  CHECK_EQ(rendezvous.Arrive(key, MakeInfo(3, 60), MakeArrival(2, promises[2])).size(), size_t{0});
  CHECK_EQ(rendezvous.Arrive(key, MakeInfo(3, 60), MakeArrival(0, promises[0])).size(), size_t{0});
  const auto arrivals = rendezvous.Arrive(key, MakeInfo(3, 60), MakeArrival(1, promises[1]));
  CHECK_EQ(arrivals.size(), size_t{3});
  for (int64_t rank = 0; rank < 3; ++rank) {
    CHECK_EQ(arrivals[rank].rank, rank);
    arrivals[rank].completion->Complete(nullptr);
    CHECK_EQ(promises[rank].get_future().get().ok(), true);
  }
}

TEST(DroppedCallEndsWithAnError) {
  std::promise<Status> dropped, completed;
  CompletionOf(dropped);
  CHECK_CONTAINS(dropped.get_future().get().message, "dropped a call");
  CompletionOf(completed)->Complete(nullptr);
  CHECK_EQ(completed.get_future().get().ok(), true);
}

// The first completion blocks until the second one, for which there is another thread.
TEST(BlockedCompletionDoesNotDelayOthers) {
  static std::promise<void> second_ran, both_ran;
  const auto first = [](const void*, void*, Code, const char*) noexcept {
    second_ran.get_future().wait();
    both_ran.set_value();
  };
  const auto second = [](const void*, void*, Code, const char*) noexcept {
    second_ran.set_value();
  };
  CompletionThreads& threads = CompletionThreads::Instance();
  threads.Reserve(2);
  int future;
  for (const Completion::Report report : {Completion::Report(first), Completion::Report(second)}) {
    auto completion = std::make_unique<Completion>(report, nullptr);
    completion->set_future(&future);
    threads.Complete(std::move(completion), nullptr);
  }
  both_ran.get_future().wait();
}

TEST(MissingRankEndsTheWait) {
  Rendezvous& rendezvous = Rendezvous::Instance();
  std::promise<Status> early[2], late, elsewhere;
  int site, other_site;
  const CallKey key{&site, 7, 0};
  rendezvous.Arrive(key, MakeInfo(3, 0.1), MakeArrival(0, early[0]));
  rendezvous.Arrive(key, MakeInfo(3, 0.1), MakeArrival(2, early[1]));
  rendezvous.Arrive({&other_site, 7, 0}, MakeInfo(2, 60), MakeArrival(0, elsewhere));
  for (auto& promise : early) {
    const Status status = promise.get_future().get();
    CHECK_CONTAINS(status.message, "ranks 0, 2 waited 0.1 s for rank 1");
    CHECK_CONTAINS(status.message, "EPConfig.timeout_s. Is it late?");
  }
  CHECK_CONTAINS(elsewhere.get_future().get().message, "for rank 1");
  rendezvous.Arrive(key, MakeInfo(3, 0.1), MakeArrival(1, late));
  CHECK_CONTAINS(late.get_future().get().message, "for rank 1");
}

// Two ranks of a group of three wait in one call, the third in another call with more tokens.
TEST(ErrorSaysWhereMissingRanksWait) {
  struct Args : RankArgs {
    explicit Args(int64_t n) : n_tokens(n) {}
    int64_t NumTokens() const override { return n_tokens; }
    int64_t n_tokens;
  };
  const std::vector<Device> devices = {{5, {0, 0}}, {6, {0, 1}}, {7, {0, 2}}};
  HostGroupConfig config{};
  config.sizes.n_ranks = config.sizes.n_groups = 3;
  const auto group = std::make_shared<HostGroup>(config, devices);
  std::promise<Status> promises[3];
  const auto arrive = [&](const void* site, const char* name, int64_t rank, int64_t n_tokens) {
    Arrival arrival = MakeArrival(rank, promises[rank]);
    auto args = std::make_unique<Args>(n_tokens);
    args->group = group;
    args->device = devices[rank];
    arrival.args = std::move(args);
    CallInfo info = MakeInfo(3, rank == 1 ? 60 : 0.1);
    info.name = name;
    Rendezvous::Instance().Arrive({site, 50, 0}, info, std::move(arrival));
  };
  int site, other_site;
  arrive(&other_site, "combine of group late", 1, 16);
  arrive(&site, "dispatch of group early", 0, 8);
  arrive(&site, "dispatch of group early", 2, 8);
  for (auto& promise : promises) {
    CHECK_CONTAINS(promise.get_future().get().message,
                   "Meanwhile rank 1 waits in another call of the program, combine of group late, "
                   "with 16 tokens; this one has 8.");
  }
}

TEST(ShorterTimeoutIsNotHeldUpByALongerOne) {
  Rendezvous& rendezvous = Rendezvous::Instance();
  std::promise<Status> slow, fast;
  int site;
  rendezvous.Arrive({&site, 20, 0}, MakeInfo(2, 60), MakeArrival(0, slow));
  rendezvous.Arrive({&site, 21, 0}, MakeInfo(2, 0.1), MakeArrival(0, fast));
  CHECK_EQ(fast.get_future().get().ok(), false);
  rendezvous.Fail(20, FailureOf("end of test"));
  CHECK_CONTAINS(slow.get_future().get().message, "end of test");
}

TEST(FailureEndsTheRunAndNoOther) {
  Rendezvous& rendezvous = Rendezvous::Instance();
  std::promise<Status> waiting, other_run, late;
  int site;
  rendezvous.Arrive({&site, 30, 0}, MakeInfo(2, 60), MakeArrival(0, waiting));
  rendezvous.Arrive({&site, 31, 0}, MakeInfo(2, 60), MakeArrival(0, other_run));
  rendezvous.Fail(30, FailureOf("rank 1 failed"));
  CHECK_CONTAINS(waiting.get_future().get().message, "rank 1 failed");
  rendezvous.Arrive({&site, 30, 0}, MakeInfo(2, 60), MakeArrival(1, late));
  CHECK_CONTAINS(late.get_future().get().message, "rank 1 failed");
  auto future = other_run.get_future();
  CHECK_EQ(future.wait_for(std::chrono::milliseconds(50)) == std::future_status::timeout, true);
  rendezvous.Fail(31, FailureOf("end of test"));
  future.get();
}

TEST(SameRankTwiceIsAnError) {
  Rendezvous& rendezvous = Rendezvous::Instance();
  std::promise<Status> first, second;
  int site;
  rendezvous.Arrive({&site, 40, 0}, MakeInfo(2, 60), MakeArrival(0, first));
  rendezvous.Arrive({&site, 40, 0}, MakeInfo(2, 60), MakeArrival(0, second));
  CHECK_CONTAINS(first.get_future().get().message, "arrived twice");
  CHECK_CONTAINS(second.get_future().get().message, "arrived twice");
}

}  // namespace
}  // namespace jax_ep::host
