// Where the ranks of one call meet, on the CPU devices of one process.
//
// A rank that arrives leaves its arguments and returns; the last one takes the arguments of all and
// does the work. No thread waits: a rank learns the outcome through its `complete`, which its
// handler has tied to the future that it returned to XLA.
//
// Every wait ends. If not all ranks arrive within the timeout, or one of them fails, the call ends
// with an error for all of them. So does every other call of the same run, because a rank that
// failed in one call never reaches the next.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/status.h"
#include "cpu/rank_args.h"

namespace jax_ep {

using Complete = std::function<void(const Status&)>;

struct Arrival {
  int64_t rank;
  std::unique_ptr<RankArgs> args;
  Complete complete;
  std::chrono::steady_clock::time_point when{};  // set by Arrive
};

// One call of one replica. A call site is a custom call of an executable (see call_site.h). XLA:CPU
// gives all devices of a launch the same run id, and every launch a new one. A loop uses the same
// key again, but no rank arrives a second time before all have left: its own call is not complete
// until then.
struct CallKey {
  const void* call_site;
  int64_t run_id;
  int64_t replica;

  bool operator<(const CallKey& other) const {
    return std::tie(run_id, call_site, replica) <
           std::tie(other.run_id, other.call_site, other.replica);
  }
};

struct CallInfo {
  std::string name;  // for messages: "dispatch of group ..."
  int64_t n_ranks;
  double timeout_s;
  std::string late_hint = {};  // HostGroupConfig's
  int64_t first_rank = 0;      // the user's rank of rank 0, for messages
};

class Rendezvous {
 public:
  // The rendezvous of this process. Never destroyed: a late thread may still arrive.
  static Rendezvous& Instance();

  // Returns the arrivals of all ranks, by rank, if `arrival` was the last, else nothing. If the run
  // has failed, completes `arrival` with the error and returns nothing.
  std::vector<Arrival> Arrive(const CallKey& key, const CallInfo& info, Arrival arrival);

  // Ends every call of the run with `status`, including calls whose ranks have yet to arrive.
  void Fail(int64_t run_id, const Status& status);

 private:
  using Clock = std::chrono::steady_clock;

  Rendezvous() = default;

  struct Call {
    CallInfo info;
    Clock::time_point started;
    std::vector<Arrival> arrivals;  // in order of arrival
  };

  struct Deadline {
    Clock::time_point when;
    CallKey key;
    Clock::time_point started;  // distinguishes a call from a later one with the same key
  };

  // For the error of a call whose time limit is reached: in which other calls of the same run its
  // missing ranks wait, if they do. Under mutex_.
  std::string DescribeElsewhere(const CallKey& key) const;

  const Status* FindFailure(int64_t run_id) const;
  std::vector<Complete> TakeRun(int64_t run_id, const Status& status);
  void AddDeadline(const CallKey& key, const Call& call);
  bool IsWaiting(const Deadline& deadline) const;
  void WatchDeadlines();

  std::mutex mutex_;
  std::condition_variable deadline_added_;
  std::map<CallKey, Call> calls_;
  std::deque<std::pair<int64_t, Status>> failed_runs_;      // newest first, a bounded number
  std::deque<Deadline> deadlines_;                          // earliest first
  Clock::time_point next_look_ = Clock::time_point::max();  // of the watchdog thread
  bool watching_ = false;
};

}  // namespace jax_ep
