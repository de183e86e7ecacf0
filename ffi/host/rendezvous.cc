#include "host/rendezvous.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <thread>

namespace jax_ep::host {
namespace {

using Duration = std::chrono::steady_clock::duration;

Duration Seconds(double seconds) {
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

// How often the watchdog looks at a call.
Duration SliceOf(const CallInfo& info) {
  return Seconds(std::clamp(info.timeout_s / 16, 1e-6, 0.5));
}

// Whatever follows a failed call may block.
void CompleteOnThreads(std::vector<Arrival>& arrivals, const Failure& failure) {
  for (Arrival& arrival : arrivals) {
    CompletionThreads::Instance().Complete(std::move(arrival.completion), failure);
  }
}

std::string RankList(const std::vector<int64_t>& ranks, int64_t first_rank) {
  std::string list = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    list += (i == 0 ? "" : ", ") + std::to_string(first_rank + ranks[i]);
  }
  return list;
}

Status MissingRanks(const CallInfo& info, const std::vector<Arrival>& arrivals, int64_t run_id) {
  std::vector<int64_t> here, missing;
  for (const Arrival& arrival : arrivals) here.push_back(arrival.rank);
  std::sort(here.begin(), here.end());
  for (int64_t rank = 0; rank < info.n_ranks; ++rank) {
    if (!std::binary_search(here.begin(), here.end(), rank)) missing.push_back(rank);
  }
  char waited[32];
  std::snprintf(waited, sizeof(waited), "%g", info.timeout_s);
  return DeadlineExceeded(std::string(info.name) + ": " + RankList(here, info.first_rank) +
                          " waited " + waited + " s for " + RankList(missing, info.first_rank) +
                          " (run " + std::to_string(static_cast<uint32_t>(run_id)) +
                          "). Every rank of the group must make the same calls; a slower one "
                          "needs a larger EPConfig.timeout_s." +
                          std::string(info.late_hint));
}

Status ArrivedTwice(const CallInfo& info, int64_t rank) {
  return Internal(std::string(info.name) + ": rank " + std::to_string(info.first_rank + rank) +
                  " arrived twice at the same call");
}

// The status that `make` returns or, if there is no memory for it, the call's own.
template <class Make>
Failure ToFailure(const CallInfo& info, const Failure& out_of_memory, const Make& make) {
  try {
    return std::make_shared<const Status>(make());
  } catch (...) {
    return info.out_of_memory == nullptr ? out_of_memory : info.out_of_memory;
  }
}

}  // namespace

void CountWaits(const std::vector<Arrival>& arrivals, size_t kind) {
  const size_t n_ranks = arrivals.size();
  for (const Arrival& own : arrivals) {
    own.args->group->UpdateStats(own.args->device.coordinate, [&](RankStats& stats) {
      for (size_t peer = 0; peer < n_ranks; ++peer) {
        if (arrivals[peer].when <= own.when) continue;
        const int64_t ns =
            std::chrono::duration_cast<std::chrono::nanoseconds>(arrivals[peer].when - own.when)
                .count();
        stats.wait_ns[kind * n_ranks + peer] += ns;
        int64_t& longest = stats.longest_wait_ns[kind * n_ranks + peer];
        longest = std::max(longest, ns);
      }
    });
  }
}

Rendezvous::Rendezvous()
    : out_of_memory_(std::make_shared<const Status>(
          ResourceExhausted("a call of a jax_ep group: out of memory"))) {}

Rendezvous& Rendezvous::Instance() {
  static Rendezvous* const instance = new Rendezvous;
  return *instance;
}

std::vector<Arrival> Rendezvous::Arrive(const CallKey& key, const CallInfo& info,
                                        Arrival arrival) noexcept {
  Failure failure;
  try {
    std::lock_guard lock(mutex_);
    failure = FindFailure(key.run_id);
    if (failure == nullptr) {
      std::vector<Arrival> arrivals = AddArrival(key, info, arrival);
      if (arrival.completion == nullptr) return arrivals;
    }
  } catch (...) {
    failure = info.out_of_memory == nullptr ? out_of_memory_ : info.out_of_memory;
  }
  if (failure == nullptr) {
    failure = ToFailure(info, out_of_memory_, [&] { return ArrivedTwice(info, arrival.rank); });
  }
  Fail(key.run_id, failure);
  arrival.completion->Complete(failure);
  return {};
}

void Rendezvous::Fail(int64_t run_id, const Failure& given) noexcept {
  const Failure& failure = given == nullptr ? out_of_memory_ : given;
  Calls calls;
  {
    std::lock_guard lock(mutex_);
    calls = TakeRun(run_id, failure);
  }
  for (auto& entry : calls) CompleteOnThreads(entry.second.arrivals, failure);
}

std::string Rendezvous::DescribeElsewhere(const CallKey& key) const {
  const Call& call = calls_.at(key);
  const RankArgs& mine = *call.arrivals.front().args;
  if (mine.group == nullptr) return "";
  std::string text;
  for (const auto& [other_key, other] : calls_) {
    if (other_key.run_id != key.run_id || &other == &call) continue;
    std::vector<int64_t> ranks;  // of this call's group
    for (const Arrival& arrival : other.arrivals) {
      const std::optional<Device> device = mine.group->Find(arrival.args->device.ordinal);
      if (device && device->coordinate.replica == key.replica) {
        ranks.push_back(device->coordinate.rank);
      }
    }
    if (ranks.empty()) continue;
    std::sort(ranks.begin(), ranks.end());
    text += " Meanwhile " + RankList(ranks, call.info.first_rank) +
            (ranks.size() == 1 ? " waits" : " wait") + " in another call of the program, " +
            std::string(other.info.name) + ", with " +
            std::to_string(other.arrivals.front().args->NumTokens()) + " tokens; this one has " +
            std::to_string(mine.NumTokens()) + ".";
  }
  return text;
}

Failure Rendezvous::FindFailure(int64_t run_id) const {
  const size_t n_kept = std::min(n_failed_runs_, failed_runs_.size());
  for (size_t i = 0; i < n_kept; ++i) {
    if (failed_runs_[i].first == run_id) return failed_runs_[i].second;
  }
  return nullptr;
}

// Takes `arrival`, unless its rank is here already. Changes nothing if it throws.
std::vector<Arrival> Rendezvous::AddArrival(const CallKey& key, const CallInfo& info,
                                            Arrival& arrival) {
  auto it = calls_.find(key);
  if (it == calls_.end()) {
    Call call{info, {}, Clock::now()};
    call.arrivals.reserve(info.n_ranks);
    it = calls_.emplace(key, std::move(call)).first;
    saw_calls_ = true;
    if (SliceOf(info) < slice_) {
      slice_ = SliceOf(info);
      look_sooner_.notify_one();
    }
  }
  std::vector<Arrival>& arrivals = it->second.arrivals;
  for (const Arrival& other : arrivals) {
    if (other.rank == arrival.rank) return {};
  }
  arrival.when = Clock::now();
  arrivals.push_back(std::move(arrival));
  if (static_cast<int64_t>(arrivals.size()) < info.n_ranks) return {};
  std::vector<Arrival> all = std::move(arrivals);
  calls_.erase(it);
  std::sort(all.begin(), all.end(),
            [](const Arrival& a, const Arrival& b) { return a.rank < b.rank; });
  return all;
}

Rendezvous::Calls Rendezvous::TakeRun(int64_t run_id, const Failure& failure) {
  if (FindFailure(run_id) == nullptr) {
    failed_runs_[n_failed_runs_++ % failed_runs_.size()] = {run_id, failure};
  }
  Calls taken;
  for (auto it = calls_.begin(); it != calls_.end();) {
    const auto call = it++;
    if (call->first.run_id == run_id) taken.insert(calls_.extract(call));
  }
  return taken;
}

void Rendezvous::StartWatchdog() {
  std::lock_guard lock(mutex_);
  if (watching_) return;
  std::thread([this] { WatchCalls(); }).detach();
  watching_ = true;
}

// Looks at the waiting calls once per slice, as long as there are any; a call that begins wakes it
// only from longer sleep.
void Rendezvous::WatchCalls() {
  std::unique_lock lock(mutex_);
  for (;;) {
    while (EndLateCall(lock)) {
    }
    slice_ = Clock::duration::max();
    for (const auto& [key, call] : calls_) slice_ = std::min(slice_, SliceOf(call.info));
    if (calls_.empty() && saw_calls_) slice_ = Seconds(0.5);
    saw_calls_ = false;
    if (slice_ == Clock::duration::max()) {
      look_sooner_.wait(lock);
    } else {
      look_sooner_.wait_for(lock, slice_);
    }
    CountWaiting(Clock::now());
  }
}

// Adds the time since the last look to the time that calls have waited, but at most two slices: if
// this thread did not run for longer, nor did the process (a debugger, SIGSTOP).
void Rendezvous::CountWaiting(Clock::time_point now) {
  for (auto& [key, call] : calls_) {
    call.waited += std::min(now - call.begin, 2 * SliceOf(call.info));
    call.begin = now;
  }
}

// Ends the run of a call that has waited for too long, if there is one. The lock is held before and
// after.
bool Rendezvous::EndLateCall(std::unique_lock<std::mutex>& lock) {
  const auto late = std::find_if(calls_.begin(), calls_.end(), [](const auto& entry) {
    return entry.second.waited >= Seconds(entry.second.info.timeout_s);
  });
  if (late == calls_.end()) return false;
  const int64_t run_id = late->first.run_id;
  const Call& call = late->second;
  const Failure failure = ToFailure(call.info, out_of_memory_, [&] {
    Status status = MissingRanks(call.info, call.arrivals, run_id);
    status.message += DescribeElsewhere(late->first);
    return status;
  });
  Calls calls = TakeRun(run_id, failure);
  lock.unlock();
  for (auto& entry : calls) CompleteOnThreads(entry.second.arrivals, failure);
  calls.clear();
  lock.lock();
  return true;
}

}  // namespace jax_ep::host
