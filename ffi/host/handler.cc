#include "host/handler.h"

#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <utility>

#ifdef JAX_EP_TESTING
#include "tests/failing_calls.h"
#endif

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

// Fits every message except those of exceptions with long texts.
using Text = char[512];

// The call of a frame, as far as it is known.
struct FailedCall {
  std::optional<ffi::RunId> run;  // nothing where none is executed
  int32_t ordinal = -1;
  std::shared_ptr<HostGroup> group;  // null if unknown
  std::optional<Device> device;      // of the group
};

template <class Context>
auto FromContext(const XLA_FFI_CallFrame& frame) {
  ffi::DiagnosticEngine diagnostic;
  return ffi::CtxDecoding<Context>::Decode(frame.api, frame.ctx, diagnostic);
}

FailedCall Identify(const XLA_FFI_CallFrame& frame, const HandlerName& name) noexcept {
  FailedCall call;
  // XLA asks for a handler's metadata without a context.
  if (frame.stage != XLA_FFI_ExecutionStage_EXECUTE || frame.ctx == nullptr) return call;
  try {
    call.run = FromContext<ffi::RunId>(frame);
    call.ordinal = FromContext<ffi::DeviceOrdinal>(frame).value_or(-1);
    if (!name.operation.has_value()) return call;
    const auto site = FromContext<ffi::State<CallSite>>(frame);
    if (site.has_value()) call.group = HostGroups::Instance().Find((*site)->group);
    if (call.group != nullptr) call.device = call.group->Find(call.ordinal);
  } catch (...) {  // the rest stays unknown
  }
  return call;
}

void Describe(const FailedCall& call, const HandlerName& name, const char* what,
              Text& text) noexcept {
  if (call.device.has_value()) {
    std::snprintf(text, sizeof(text), "%s: rank %lld: %s",
                  call.group->CallName(*name.operation).c_str(),
                  static_cast<long long>(call.group->OfUser(call.device->coordinate).rank), what);
  } else if (call.run.has_value()) {
    std::snprintf(text, sizeof(text), "%s on device %d: %s", name.text, call.ordinal, what);
  } else {
    std::snprintf(text, sizeof(text), "%s: %s", name.text, what);
  }
}

// Ends the run: the rank never reaches later calls.
void FailRun(const FailedCall& call, const HandlerName& name, Code code,
             const char* text) noexcept {
  if (!call.run.has_value()) return;
  Failure failure;
  try {
    failure = std::make_shared<const Status>(Status{code, text});
  } catch (...) {
    if (call.device) failure = call.group->OutOfMemory(*name.operation, call.ordinal);
  }
  Rendezvous::Instance().Fail(call.run->run_id, failure);
}

XLA_FFI_Error* EndCall(const XLA_FFI_CallFrame& frame, const HandlerName& name, Code code,
                       const char* what) noexcept {
  const FailedCall call = Identify(frame, name);
  Text text;
  Describe(call, name, what, text);
  FailRun(call, name, code, text);
  return MakeError(frame.api, code, text);
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
#ifdef JAX_EP_TESTING
  if (const auto message = FailingCalls::Instance().Take(call.site->group, call.ordinal)) {
    const int64_t rank = args.group->OfUser(device->coordinate).rank;
    return Internal("rank " + std::to_string(rank) + ": " + *message);
  }
#endif
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

XLA_FFI_Error* Guarded(XLA_FFI_CallFrame* frame, const HandlerName& name,
                       XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) noexcept {
  try {
    return handler(frame);
  } catch (const std::bad_alloc&) {
    return EndCall(*frame, name, Code::kResourceExhausted, kOutOfMemory);
  } catch (const std::exception& error) {
    return EndCall(*frame, name, Code::kInternal, error.what());
  } catch (...) {
    return EndCall(*frame, name, Code::kInternal, "an exception of unknown type");
  }
}

}  // namespace jax_ep::host
