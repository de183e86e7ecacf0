// Where the ranks of one call meet, on the CPU devices of one process.
//
// A rank that arrives leaves its arguments and returns; the last one takes the arguments of all and
// does the work. No thread waits: a rank learns the outcome through its completion, which its
// handler has tied to the future that it returned to XLA.
//
// Every wait ends. If not all ranks arrive within the timeout, or one of them fails, the call ends
// with an error for all of them. So does every other call of the same run, because a rank that
// failed in one call never reaches the next.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "core/status.h"
#include "host/completion.h"
#include "host/group.h"

namespace jax_ep::host {

struct Arrival {
  int64_t rank;
  std::unique_ptr<RankArgs> args;
  std::unique_ptr<Completion> completion;
  std::chrono::steady_clock::time_point when{};  // set by Arrive
};

// The arguments of a rank; `arrivals` by rank.
template <class Args>
Args& ArgsAt(const std::vector<Arrival>& arrivals, int64_t rank) {
  return static_cast<Args&>(*arrivals[rank].args);
}

// One call of one replica. A call site is a custom call of an executable (see handler.h). XLA:CPU
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

// The facts of a call. They refer to the group, which each rank's arguments keep alive.
struct CallInfo {
  std::string_view name;  // for messages: "dispatch of group ..."
  int64_t n_ranks;
  double timeout_s;
  std::string_view late_hint = {};  // HostGroupConfig's
  int64_t first_rank = 0;           // the user's rank of rank 0, for messages
  Failure out_of_memory = {};       // for want of memory for another error; null = a general one
};

// Rows of RankStats::wait_ns and longest_wait_ns.
constexpr size_t kDispatchWaits = 0;
constexpr size_t kCombineWaits = 1;

// Adds to each rank's totals of waits the time from its arrival to every later one; `arrivals` by
// rank.
void CountWaits(const std::vector<Arrival>& arrivals, size_t kind);

class Rendezvous {
 public:
  // The rendezvous of this process. Never destroyed: a late thread may still arrive.
  static Rendezvous& Instance();

  // Starts the thread that ends calls after their timeout. It lives as long as the process. Throws
  // std::system_error if the system refuses it.
  void StartWatchdog();

  // Returns the arrivals of all ranks, by rank, if `arrival` was the last, else nothing. Also
  // returns nothing if the run has failed, or fails now: then `arrival` is completed with the
  // error.
  std::vector<Arrival> Arrive(const CallKey& key, const CallInfo& info, Arrival arrival) noexcept;

  // Ends every call of the run with `failure`, including calls whose ranks have yet to arrive.
  // Null: there is no memory for one.
  void Fail(int64_t run_id, const Failure& failure) noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  struct Call {
    CallInfo info;
    std::vector<Arrival> arrivals;  // in order of arrival
    Clock::time_point begin;        // of the time that is not in `waited`
    Clock::duration waited{};       // while this process ran: see CountWaiting
  };

  using Calls = std::map<CallKey, Call>;

  Rendezvous();

  // For the error of a call whose time limit is reached: in which other calls of the same run its
  // missing ranks wait, if they do. Under mutex_.
  std::string DescribeElsewhere(const CallKey& key) const;

  Failure FindFailure(int64_t run_id) const;
  std::vector<Arrival> AddArrival(const CallKey& key, const CallInfo& info, Arrival& arrival);
  Calls TakeRun(int64_t run_id, const Failure& failure);
  void WatchCalls();
  void CountWaiting(Clock::time_point now);
  bool EndLateCall(std::unique_lock<std::mutex>& lock);

  const Failure out_of_memory_;
  std::mutex mutex_;
  Calls calls_;
  // The runs that failed last, in a ring.
  std::array<std::pair<int64_t, Failure>, 256> failed_runs_;
  size_t n_failed_runs_ = 0;  // ever

  // The watchdog's.
  bool watching_ = false;
  std::condition_variable look_sooner_;
  Clock::duration slice_ = Clock::duration::max();  // from one look to the next; max = it sleeps
  bool saw_calls_ = false;                          // since the last look
};

}  // namespace jax_ep::host
