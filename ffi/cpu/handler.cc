#include "cpu/handler.h"

#include <functional>
#include <optional>

#include "core/routing.h"
#include "cpu/group.h"
#include "xla_error.h"

namespace jax_ep {
namespace {

void SetPromise(ffi::Promise promise, const Status& status) {
  if (status.ok()) {
    promise.SetAvailable();
  } else {
    promise.SetError(ToError(status));
  }
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

}  // namespace

Status FindPlace(const Call& call, int32_t place_index, int64_t n_tokens, RankArgs& args) {
  const std::string device_name = "device " + std::to_string(call.ordinal);
  args.config = call.config();
  args.n_tokens = n_tokens;
  args.group = HostGroups::Instance().Find(call.site->group);
  if (args.group == nullptr) {
    return FailedPrecondition(
        call.Name() +
        ": the group is not open in this process. Was it closed? Call "
        "ep_init with the mesh and config that the function was traced with.");
  }
  const std::optional<Device> device = args.group->Find(call.ordinal);
  if (!device) {
    return FailedPrecondition(call.Name() + ": " + device_name +
                              " is not in the group. Call ep_init with the mesh that the function "
                              "runs on.");
  }
  const int64_t n_ranks = call.config().n_ranks;
  const Device place{device->ordinal, place_index / n_ranks, place_index % n_ranks};
  if (device->row != place.row || device->rank != place.rank) {
    const bool is_row = device->row != place.row;
    const std::string what = is_row ? "row " : "rank ";
    return FailedPrecondition(call.Name() + ": " + device_name + " is " + what +
                              std::to_string(is_row ? device->row : device->rank) +
                              " of the group, but " + what +
                              std::to_string(is_row ? place.row : place.rank) +
                              " of the mesh that the function runs on. Call ep_init with that "
                              "mesh.");
  }
  args.device = *device;
  if (const auto message = args.group->TakeFailure(call.ordinal)) {
    return Internal(call.Name() + ": rank " + std::to_string(device->rank) + ": " + *message);
  }
  return {};
}

Status CheckLayout(const Call& call, const int32_t* topk_ids, const int32_t* dst_rows,
                   int64_t n_choices) {
  const EpConfig& config = call.config();
  for (int64_t i = 0; i < n_choices; ++i) {
    const bool has_expert = topk_ids[i] >= 0 && topk_ids[i] < config.n_experts;
    const bool has_row = dst_rows[i] >= 0 && dst_rows[i] < config.max_recv_tokens;
    if (dst_rows[i] == kNoRow || (has_expert && has_row)) continue;
    return call.Invalid(
        "dispatched must be what a dispatch of this group gave, unchanged; choice " +
        std::to_string(i) + " has expert " + std::to_string(topk_ids[i]) + " and row " +
        std::to_string(dst_rows[i]));
  }
  return {};
}

ffi::Future FailRun(const Call& call, const Status& status) {
  Rendezvous::Instance().Fail(call.run.run_id, status);
  ffi::Promise promise;
  ffi::Future future(promise);
  SetPromise(promise, status);
  return future;
}

ffi::Future Meet(const Call& call, std::unique_ptr<RankArgs> args, Work work) {
  ffi::Promise promise;
  ffi::Future future(promise);
  const Device device = args->device;
  std::vector<Arrival> arrivals = Rendezvous::Instance().Arrive(
      {call.site, call.run.run_id, device.row},
      {call.Name(), call.config().n_ranks, call.config().timeout_s},
      {device.rank, std::move(args),
       [promise](const Status& status) { SetPromise(promise, status); }});
  if (arrivals.empty()) return future;
  const Pool pool{[&](std::function<void()> task) { call.pool->Schedule(std::move(task)); },
                  call.pool->num_threads()};
  work(pool, arrivals);
  // The others on the pool: what follows a completed call may block, and must not hold up the rest.
  for (Arrival& arrival : arrivals) {
    if (arrival.rank == device.rank) continue;
    call.pool->Schedule([complete = std::move(arrival.complete)] { complete(Status{}); });
  }
  arrivals[device.rank].complete(Status{});
  return future;
}

Status ToRowType(const Call& call, ffi::DataType type, RowType& row_type) {
  switch (type) {
    case ffi::BF16:
      row_type = RowType::kBFloat16;
      return {};
    case ffi::F16:
      row_type = RowType::kFloat16;
      return {};
    case ffi::F32:
      row_type = RowType::kFloat32;
      return {};
    default:
      return call.Invalid("rows must be bfloat16, float16 or float32");
  }
}

void ShapeCheck::Compare(const char* name, const std::vector<int64_t>& got,
                         const std::vector<int64_t>& expected) {
  if (got == expected || !status_.ok()) return;
  status_ = call_.Invalid(std::string(name) + " must have the shape " + ShapeText(expected) +
                          "; got " + ShapeText(got));
}

}  // namespace jax_ep
