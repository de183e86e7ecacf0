#include "cpu/rendezvous.h"

#include <algorithm>
#include <cstdio>
#include <thread>
#include <utility>

namespace jax_ep {
namespace {

constexpr size_t kFailedRunsKept = 256;

// Whatever follows a failed call may block, so each completion gets a thread of its own.
void CompleteOnThreads(std::vector<Complete> completes, const Status& status) {
  for (Complete& complete : completes) {
    std::thread([complete = std::move(complete), status] { complete(status); }).detach();
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
  return DeadlineExceeded(info.name + ": " + RankList(here, info.first_rank) + " waited " + waited +
                          " s for " + RankList(missing, info.first_rank) + " (run " +
                          std::to_string(static_cast<uint32_t>(run_id)) +
                          "). Every rank of the group must make the same calls; a slower one "
                          "needs a larger EPConfig.timeout_s." +
                          info.late_hint);
}

}  // namespace

Rendezvous& Rendezvous::Instance() {
  static Rendezvous* const instance = new Rendezvous;
  return *instance;
}

std::vector<Arrival> Rendezvous::Arrive(const CallKey& key, const CallInfo& info, Arrival arrival) {
  std::unique_lock lock(mutex_);
  if (const Status* failure = FindFailure(key.run_id)) {
    const Status status = *failure;
    lock.unlock();
    arrival.complete(status);
    return {};
  }
  const bool is_first = calls_.find(key) == calls_.end();
  Call& call = calls_[key];
  if (is_first) {
    call.info = info;
    call.started = Clock::now();
    call.arrivals.reserve(info.n_ranks);
  }
  for (const Arrival& other : call.arrivals) {
    if (other.rank != arrival.rank) continue;
    lock.unlock();
    const Status status =
        Internal(info.name + ": rank " + std::to_string(info.first_rank + arrival.rank) +
                 " arrived twice at the same call");
    arrival.complete(status);
    Fail(key.run_id, status);
    return {};
  }
  arrival.when = Clock::now();
  call.arrivals.push_back(std::move(arrival));
  if (static_cast<int64_t>(call.arrivals.size()) < info.n_ranks) {
    if (is_first) AddDeadline(key, call);
    return {};
  }
  std::vector<Arrival> arrivals = std::move(call.arrivals);
  calls_.erase(key);
  lock.unlock();
  std::sort(arrivals.begin(), arrivals.end(),
            [](const Arrival& a, const Arrival& b) { return a.rank < b.rank; });
  return arrivals;
}

void Rendezvous::Fail(int64_t run_id, const Status& status) {
  std::vector<Complete> completes;
  {
    std::lock_guard lock(mutex_);
    completes = TakeRun(run_id, status);
  }
  CompleteOnThreads(std::move(completes), status);
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
            other.info.name + ", with " + std::to_string(other.arrivals.front().args->NumTokens()) +
            " tokens; this one has " + std::to_string(mine.NumTokens()) + ".";
  }
  return text;
}

const Status* Rendezvous::FindFailure(int64_t run_id) const {
  for (const auto& [failed_run, status] : failed_runs_) {
    if (failed_run == run_id) return &status;
  }
  return nullptr;
}

std::vector<Complete> Rendezvous::TakeRun(int64_t run_id, const Status& status) {
  if (FindFailure(run_id) == nullptr) failed_runs_.emplace_front(run_id, status);
  if (failed_runs_.size() > kFailedRunsKept) failed_runs_.pop_back();
  std::vector<Complete> completes;
  for (auto it = calls_.begin(); it != calls_.end();) {
    if (it->first.run_id != run_id) {
      ++it;
      continue;
    }
    for (Arrival& arrival : it->second.arrivals) completes.push_back(std::move(arrival.complete));
    it = calls_.erase(it);
  }
  return completes;
}

bool Rendezvous::IsWaiting(const Deadline& deadline) const {
  const auto it = calls_.find(deadline.key);
  return it != calls_.end() && it->second.started == deadline.started;
}

void Rendezvous::AddDeadline(const CallKey& key, const Call& call) {
  while (!deadlines_.empty() && !IsWaiting(deadlines_.front())) deadlines_.pop_front();
  const auto timeout = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(call.info.timeout_s));
  const Deadline deadline{call.started + timeout, key, call.started};
  const auto later =
      std::upper_bound(deadlines_.begin(), deadlines_.end(), deadline,
                       [](const Deadline& a, const Deadline& b) { return a.when < b.when; });
  deadlines_.insert(later, deadline);
  if (!watching_) {
    watching_ = true;
    std::thread([this] { WatchDeadlines(); }).detach();
  } else if (deadline.when < next_look_) {
    deadline_added_.notify_one();
  }
}

void Rendezvous::WatchDeadlines() {
  std::unique_lock lock(mutex_);
  for (;;) {
    while (!deadlines_.empty() && !IsWaiting(deadlines_.front())) deadlines_.pop_front();
    if (deadlines_.empty()) {
      next_look_ = Clock::time_point::max();
      deadline_added_.wait(lock);
      continue;
    }
    const Deadline deadline = deadlines_.front();
    if (Clock::now() < deadline.when) {
      next_look_ = deadline.when;
      deadline_added_.wait_until(lock, deadline.when);
      continue;
    }
    const Call& call = calls_.at(deadline.key);
    Status status = MissingRanks(call.info, call.arrivals, deadline.key.run_id);
    status.message += DescribeElsewhere(deadline.key);
    std::vector<Complete> completes = TakeRun(deadline.key.run_id, status);
    lock.unlock();
    CompleteOnThreads(std::move(completes), status);
    lock.lock();
  }
}

}  // namespace jax_ep
