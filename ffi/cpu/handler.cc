#include "cpu/handler.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <thread>
#include <utility>

#include "core/routing.h"
#include "cpu/group.h"
#include "xla/error.h"

namespace jax_ep {
namespace {

void SetPromise(ffi::Promise promise, const Status& status) {
  if (status.ok()) {
    promise.SetAvailable();
  } else {
    promise.SetError(ToError(status));
  }
}

std::string DeviceName(const Call& call) { return "device " + std::to_string(call.ordinal); }

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

Status CheckDstRows(const GroupSizes& sizes, int64_t n_tokens, int64_t max_recv_tokens,
                    const int32_t* group_ids, const int32_t* dst_rows) {
  for (int64_t i = 0; i < n_tokens * sizes.n_choices; ++i) {
    const bool has_group = group_ids[i] >= 0 && group_ids[i] < sizes.n_groups;
    const bool has_row = dst_rows[i] >= 0 && dst_rows[i] < max_recv_tokens;
    if (dst_rows[i] == kNoRow || (has_group && has_row)) continue;
    return InvalidArgument(
        "dispatched must be the unchanged result of a dispatch of this group; choice " +
        std::to_string(i) + " has group " + std::to_string(group_ids[i]) + " and row " +
        std::to_string(dst_rows[i]));
  }
  return {};
}

Status CheckRowOffsets(const GroupSizes& sizes, int64_t max_recv_tokens,
                       const uint32_t* row_offsets) {
  const int64_t n_groups = sizes.n_local_groups();
  const bool rises = std::is_sorted(row_offsets, row_offsets + n_groups + 1);
  if (rises && row_offsets[0] == 0 && row_offsets[n_groups] <= max_recv_tokens) return {};
  return InvalidArgument(
      "dispatched must be the unchanged result of a dispatch of this group; row_offsets must rise "
      "from 0 to at most " +
      std::to_string(max_recv_tokens) + ", got " + std::to_string(row_offsets[0]) + " to " +
      std::to_string(row_offsets[n_groups]));
}

ffi::Future FailRun(const Call& call, Status status) {
  status.message = call.Name() + ": " + status.message;
  Rendezvous::Instance().Fail(call.run.run_id, status);
  ffi::Promise promise;
  ffi::Future future(promise);
  SetPromise(promise, status);
  return future;
}

ffi::Future Meet(const Call& call, std::unique_ptr<RankArgs> args, Work work) {
  ffi::Promise promise;
  ffi::Future future(promise);
  const auto [replica, rank] = args->device.coordinate;
  const HostGroupConfig& config = args->group->config();
  const int64_t first_rank = args->group->OfUser({replica, 0}).rank;
  std::vector<Arrival> arrivals = Rendezvous::Instance().Arrive(
      {call.site, call.run.run_id, replica},
      {call.Name(), config.sizes.n_ranks, config.timeout_s, config.late_hint, first_rank},
      {rank, std::move(args), [promise](const Status& status) { SetPromise(promise, status); }});
  if (arrivals.empty()) return future;
  const Pool pool{[&](std::function<void()> task) { call.pool->Schedule(std::move(task)); },
                  call.pool->num_threads()};
  work(pool, arrivals);
  // The others are completed elsewhere: work after a completed call may block, and must not delay
  // the rest. Inside nodes it does, in XLA's collectives between them: with few threads, all of the
  // pool may wait there for ranks that wait for these completions. So each gets a thread of its
  // own.
  const bool has_own_threads = config.sizes.n_source_nodes > 1;
  for (Arrival& arrival : arrivals) {
    if (arrival.rank == rank) continue;
    auto complete = [complete = std::move(arrival.complete)] { complete(Status{}); };
    if (has_own_threads) {
      std::thread(std::move(complete)).detach();
    } else {
      call.pool->Schedule(std::move(complete));
    }
  }
  arrivals[rank].complete(Status{});
  return future;
}

}  // namespace jax_ep
