#include "host/handler.h"

#include <exception>
#include <functional>
#include <new>
#include <optional>
#include <utility>

namespace jax_ep::host {
namespace {

std::string DeviceName(const Call& call) { return "device " + std::to_string(call.ordinal); }

// Does the work. What it throws is the failure of rank `rank`, which did it for all.
Failure DoWork(const Call& call, const CallInfo& info, Work work, int64_t rank,
               const std::vector<Arrival>& arrivals) noexcept {
  const Pool pool{[&](std::function<void()> task) { call.pool->Schedule(std::move(task)); },
                  call.pool->num_threads()};
  try {
    try {
      work(pool, arrivals);
      return nullptr;
    } catch (const std::bad_alloc&) {
      return info.out_of_memory;
    } catch (const std::exception& error) {
      return std::make_shared<const Status>(Internal(std::string(info.name) + ": rank " +
                                                     std::to_string(info.first_rank + rank) + ": " +
                                                     error.what()));
    }
  } catch (...) {
    return info.out_of_memory;
  }
}

// Completes on XLA's pool or, if that has no memory for it, on a thread of our own.
void CompleteOnPool(const Call& call, std::unique_ptr<Completion> completion) noexcept {
  Completion* const scheduled = completion.get();
  try {
    call.pool->Schedule(
        [scheduled] { std::unique_ptr<Completion>(scheduled)->Complete(/*failure=*/nullptr); });
    completion.release();
  } catch (...) {
    CompletionThreads::Instance().Complete(std::move(completion), nullptr);
  }
}

// The work of the last rank to arrive, which computes for all.
void FinishCall(const Call& call, const CallInfo& info, Work work, int64_t rank,
                std::vector<Arrival>& arrivals) noexcept {
  const Failure failure = DoWork(call, info, work, rank, arrivals);
  if (failure != nullptr) Rendezvous::Instance().Fail(call.run.run_id, failure);
  // The others are completed elsewhere: work after a completed call may block, and must not delay
  // the rest. Inside nodes it does, in XLA's collectives between them: with few threads, all of the
  // pool may wait there for ranks that wait for these completions.
  const bool may_block = arrivals[rank].args->sizes().n_source_nodes > 1 || failure != nullptr;
  for (Arrival& arrival : arrivals) {
    if (arrival.rank == rank) continue;
    if (may_block) {
      CompletionThreads::Instance().Complete(std::move(arrival.completion), failure);
    } else {
      CompleteOnPool(call, std::move(arrival.completion));
    }
  }
  arrivals[rank].completion->Complete(failure);
}

}  // namespace

Status FindCaller(const Call& call, RankArgs& args) {
  args.group = HostGroups::Instance().Find(call.site->group);
  if (args.group == nullptr) {
    return FailedPrecondition(
        "the group is not open in this process. Was it closed? Call ep_init with the "
        "arguments of the group that the function was traced with.");
  }
  const std::optional<Device> device = args.group->Find(call.ordinal);
  if (!device) {
    return FailedPrecondition(DeviceName(call) +
                              " is not in the group. Call ep_init with the mesh that the function "
                              "runs on.");
  }
  args.device = *device;
  if (const auto message = args.group->TakeFailure(call.ordinal)) {
    const int64_t rank = args.group->OfUser(device->coordinate).rank;
    return Internal("rank " + std::to_string(rank) + ": " + *message);
  }
  return {};
}

Status CheckCoordinate(const Call& call, int32_t coordinate, const RankArgs& args) {
  const int64_t n_ranks = args.sizes().n_ranks;
  const MeshCoordinate known = args.group->OfUser(args.device.coordinate);
  const MeshCoordinate meant = args.group->OfUser({coordinate / n_ranks, coordinate % n_ranks});
  if (known.replica == meant.replica && known.rank == meant.rank) return {};
  const bool is_replica = known.replica != meant.replica;
  const std::string what = is_replica ? "replica " : "rank ";
  return FailedPrecondition(
      DeviceName(call) + " is " + what + std::to_string(is_replica ? known.replica : known.rank) +
      " of the group, but " + what + std::to_string(is_replica ? meant.replica : meant.rank) +
      " of the mesh that the function runs on. Call ep_init with that mesh.");
}

FutureOrError FailRun(const Call& call, Status status) {
  status.message =
      std::string(Name(call.operation)) + " of group " + call.site->group + ": " + status.message;
  const auto failure = std::make_shared<const Status>(std::move(status));
  Rendezvous::Instance().Fail(call.run.run_id, failure);
  return {nullptr, MakeError(call.runtime.api, failure->code, failure->message.c_str())};
}

FutureOrError Meet(const Call& call, std::unique_ptr<RankArgs> args, Work work) {
  const HostGroup& group = *args->group;
  const HostGroupConfig& config = group.config();
  const auto [replica, rank] = args->device.coordinate;
  const CallInfo info{group.CallName(call.operation),
                      config.sizes.n_ranks,
                      config.timeout_s,
                      config.late_hint,
                      group.OfUser({replica, 0}).rank,
                      group.OutOfMemory(call.operation, call.ordinal)};
  Arrival arrival{rank, std::move(args), MakeCompletion(call.runtime)};
  const FutureOrError result = MakeFuture(call.runtime, *arrival.completion);
  if (result.error != nullptr) {
    Rendezvous::Instance().Fail(call.run.run_id, info.out_of_memory);
    return result;
  }
  std::vector<Arrival> arrivals = Rendezvous::Instance().Arrive(
      {call.site, call.run.run_id, replica}, info, std::move(arrival));
  if (!arrivals.empty()) FinishCall(call, info, work, rank, arrivals);
  return result;
}

}  // namespace jax_ep::host
