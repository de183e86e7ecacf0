// XLA FFI -> the kernels of copies.h. The ranks of a group, each on a thread of XLA's, meet in host
// memory to tell each other where their arrays are; events of CUDA order what they then launch.

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "p2p/call/meeting.h"
#include "p2p/call/read_call.h"
#include "p2p/copies/copies.h"
#include "p2p/launch/cuda_status.h"
#include "p2p/launch/stream_order.h"

namespace jax_ep::p2p {
namespace {

// What a rank tells the others, which then wait for the event.
struct Visit {
  const void* array = nullptr;
  cudaEvent_t event = nullptr;
  // The call that it makes: the same on all ranks.
  std::string_view operation{};
  int64_t n = 0, entry_bytes = 0;

  bool IsOfCall(const Visit& other) const {
    return operation == other.operation && n == other.n && entry_bytes == other.entry_bytes;
  }
  std::string Call() const {
    return std::string(operation) + ", " + std::to_string(n) + " entries of " +
           std::to_string(entry_bytes) + " bytes";
  }
};

// Of a rank; one for each meeting of a call. Never destroyed, as few as there are devices.
struct Events {
  cudaEvent_t ready = nullptr, done = nullptr;
};

// The meetings of the open groups, and the events of their ranks.
class Meetings {
 public:
  static Meetings& Instance() {
    static Meetings* const meetings = new Meetings;
    return *meetings;
  }

  std::shared_ptr<Meeting<Visit>> Find(const std::shared_ptr<RankGroup>& group) {
    std::lock_guard lock(mutex_);
    std::shared_ptr<Meeting<Visit>>& found = meetings_[group];
    if (found != nullptr) return found;
    const auto made = std::make_shared<Meeting<Visit>>(group->config().n_ranks);
    found = made;
    for (auto it = meetings_.begin(); it != meetings_.end();) {
      it = it->first.expired() ? meetings_.erase(it) : std::next(it);
    }
    return made;
  }

  Status FindEvents(int device, Events* events) {
    std::lock_guard lock(mutex_);
    Events& found = events_[device];
    for (cudaEvent_t* const event : {&found.ready, &found.done}) {
      if (*event != nullptr) continue;
      const Status status = ToStatus(cudaEventCreateWithFlags(event, cudaEventDisableTiming),
                                     "creating an event for copies of experts");
      if (!status.ok()) return status;
    }
    *events = found;
    return {};
  }

 private:
  std::mutex mutex_;
  std::map<std::weak_ptr<RankGroup>, std::shared_ptr<Meeting<Visit>>, std::owner_less<>> meetings_;
  std::map<int, Events> events_;
};

// Operands: the coordinate, an array [*, w], the result so far [n, w], entries [R, n]. Result:
// [n, w].
Status Read(const Caller& caller, const BufferList& operands, const BufferList& results,
            CopiesArgs* args, const void** array, const void** kept) {
  Status status;
  BufferReader operand_reader(operands, status), result_reader(results, status);
  args->rank = caller.member.rank;
  args->n_ranks = static_cast<int32_t>(caller.config().n_ranks);
  args->n = operand_reader.Dim(2, 0);
  const ffi::DataType type = operand_reader.Type(1);
  const int64_t width = operand_reader.Dim(1, 1);
  operand_reader.Next<int32_t>("coordinate", {});
  *array = operand_reader.Next("the array", type, {Shape::kAnySize, width});
  *kept = operand_reader.Next("the result so far", type, {args->n, width});
  args->entries = operand_reader.Next<int32_t>("entries", {args->n_ranks, args->n});
  operand_reader.ExpectEnd("operands");
  args->out = static_cast<uint8_t*>(result_reader.Next("the result", type, {args->n, width}));
  result_reader.ExpectEnd("results");
  if (!status.ok()) return status;
  args->entry_bytes = width * static_cast<int64_t>(ffi::ByteWidth(type));
  if (args->entry_bytes % kVectorBytes != 0 || args->n_ranks > kMaxCopyRanks ||
      CopiesSmemBytes(args->n, args->n_ranks) > kMaxCopiesSmemBytes) {
    return InvalidArgument("entries must be multiples of 16 bytes, of few ranks; got " +
                           std::to_string(args->entry_bytes) + " bytes, " +
                           std::to_string(args->n_ranks) + " ranks and " + std::to_string(args->n) +
                           " entries");
  }
  return {};
}

// Makes the stream wait for all that the others launch before they come. If the ranks are in
// different calls, all get an error.
Status MeetAndWait(Meeting<Visit>& meeting, const Caller& caller, const Visit& own,
                   cudaStream_t stream, std::vector<Visit>* visits) {
  Status status = ToStatus(cudaEventRecord(own.event, stream), "recording an event");
  if (status.ok()) {
    status = meeting.Meet(caller.member.rank, own, caller.config().timeout_s, visits);
  }
  for (size_t rank = 0; status.ok() && rank < visits->size(); ++rank) {
    const Visit& other = (*visits)[rank];
    if (!other.IsOfCall(own)) {
      return InvalidArgument("all ranks must make the same call; rank " + std::to_string(rank) +
                             " makes " + other.Call() + ", this one " + own.Call());
    }
    status = ToStatus(cudaStreamWaitEvent(stream, other.event), "waiting for a rank");
  }
  return status;
}

template <class Launch>
Status Run(const Caller& caller, cudaStream_t stream, int32_t ordinal, const BufferList& operands,
           const BufferList& results, const Launch& launch) {
  CopiesArgs args{};
  const void *array = nullptr, *kept = nullptr;
  Status status = Read(caller, operands, results, &args, &array, &kept);
  Events events;
  if (status.ok()) status = Meetings::Instance().FindEvents(ordinal, &events);
  if (!status.ok()) return status;
  if (kept != args.out) {  // XLA makes the call work on slices of larger arrays
    status = ToStatus(cudaMemcpyAsync(args.out, kept, args.n * args.entry_bytes,
                                      cudaMemcpyDeviceToDevice, stream),
                      "copying the result so far");
  }
  const auto meeting = Meetings::Instance().Find(caller.member.group);
  std::vector<Visit> visits;
  Visit own{array, events.ready, caller.operation, args.n, args.entry_bytes};
  if (status.ok()) status = MeetAndWait(*meeting, caller, own, stream, &visits);
  if (!status.ok()) return status;
  for (size_t rank = 0; rank < visits.size(); ++rank) {
    args.arrays[rank] = static_cast<const uint8_t*>(visits[rank].array);
  }
  if (args.n > 0) status = ToStatus(launch(args, stream), "launching the kernel");
  // XLA may give the array to others once no rank reads it.
  own.event = events.done;
  if (status.ok()) status = MeetAndWait(*meeting, caller, own, stream, &visits);
  return status;
}

template <class Launch>
ffi::Error RunInOrder(const char* operation, std::string_view group, cudaStream_t stream,
                      int32_t ordinal, StreamOrder order, ffi::RemainingArgs operands,
                      ffi::RemainingRets results, const Launch& launch) {
  Caller caller{operation, group};
  Status status = FindCaller(ordinal, caller);
  if (!status.ok()) return ToError(status);
  const cudaError_t error = LaunchInOrder(ordinal, stream, order, [&](cudaEvent_t) {
    status = Run(caller, stream, ordinal, BufferList(operands), BufferList(results), launch);
    return cudaSuccess;
  });
  if (!status.ok()) return InvalidOperands(caller, status);
  return ToError(error, operation);
}

ffi::Error PullImpl(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                    ffi::RemainingArgs operands, ffi::RemainingRets results, std::string_view group,
                    StreamOrder order) {
  return RunInOrder("bringing copies of experts", group, stream, ordinal, order, operands, results,
                    LaunchPullCopies);
}

ffi::Error AddImpl(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                   ffi::RemainingArgs operands, ffi::RemainingRets results, std::string_view group,
                   StreamOrder order) {
  const BufferList buffers(operands);
  const ffi::AnyBuffer* const array = buffers.Find(1);
  const auto type = array == nullptr ? std::nullopt : ToRowType(array->element_type());
  return RunInOrder("adding gradients of copies of experts", group, stream, ordinal, order,
                    operands, results, [&](const CopiesArgs& args, cudaStream_t stream) {
                      return type.has_value() ? LaunchAddCopies(args, *type, stream)
                                              : cudaErrorInvalidValue;
                    });
}

auto Bind() {
  return BindGroupCall().RemainingRets().Attr<std::string_view>("group").Attr<StreamOrder>(
      "stream_order");
}

}  // namespace

// Not captured: ranks meet on the host in every run.
JAX_EP_DEFINE_TARGET("jax_ep_pull_copies", CudaPullCopies, PullImpl, Bind());
JAX_EP_DEFINE_TARGET("jax_ep_add_copies", CudaAddCopies, AddImpl, Bind());

}  // namespace jax_ep::p2p
