// XLA FFI -> copies of experts between the devices of a process. The ranks of a group, each on a
// thread of XLA's, meet in host memory to tell each other where their arrays are; events of CUDA
// order what they then launch. Copy engines bring weights while kernels run; a kernel adds
// gradients.

#include <map>
#include <memory>
#include <mutex>
#include <optional>
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

// What a rank tells the others: where its array is, and what they wait for before they use that.
struct Visit {
  void* array = nullptr;
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

// What a call needs while it is in flight: events, and the host's copy of what is sent.
struct Resources {
  cudaEvent_t ready = nullptr, read = nullptr, done = nullptr;
  int32_t* entries = nullptr;  // [kMaxCopyEntries], page-locked

  // On the current device.
  Status Create() {
    Status status =
        ToStatus(cudaMallocHost(&entries, kMaxCopyEntries * sizeof(int32_t)), "allocating memory");
    for (cudaEvent_t* const event : {&ready, &read, &done}) {
      if (!status.ok()) break;
      status =
          ToStatus(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "creating an event");
    }
    return status;
  }
};

// A call that has begun to send.
struct Sending {
  Resources own;
  const uint8_t* array = nullptr;
  std::vector<Visit> visits;
};

// Of a device: the stream of its copies to others, which run beside what XLA runs, and the calls in
// flight. Never destroyed, as few as there are devices. Its device is current.
class CopyEngine {
 public:
  Status Open() {
    if (stream_ != nullptr) return {};
    return ToStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
                    "creating a stream for copies of experts");
  }
  cudaStream_t stream() const { return stream_; }

  // Until they are given back.
  Status Take(Resources* resources) {
    if (free_.empty()) return resources->Create();
    *resources = free_.back();
    free_.pop_back();
    return {};
  }
  void GiveBack(const Resources& resources) { free_.push_back(resources); }

  // Keeps what a call has begun to send, by the memory that it receives in.
  void Begin(const void* out, Sending sending) { sendings_[out] = std::move(sending); }
  // None: no call has begun.
  std::optional<Sending> End(const void* out) {
    const auto node = sendings_.extract(out);
    return node.empty() ? std::nullopt : std::optional(std::move(node.mapped()));
  }

 private:
  cudaStream_t stream_ = nullptr;
  std::vector<Resources> free_;
  std::map<const void*, Sending> sendings_;
};

// The meetings of the open groups, and the devices' copy engines.
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

  // Its calls come one after the other.
  CopyEngine& EngineOf(int device) {
    std::lock_guard lock(mutex_);
    return engines_[device];
  }

 private:
  std::mutex mutex_;
  std::map<std::weak_ptr<RankGroup>, std::shared_ptr<Meeting<Visit>>, std::owner_less<>> meetings_;
  std::map<int, CopyEngine> engines_;
};

// A call of a rank.
struct CopiesCall {
  const Caller& caller;
  cudaStream_t stream;
  CopyEngine& engine;
  Meeting<Visit>& meeting;
  CopiesArgs args;
  uint8_t* array;  // [args.n_from, args.entry_bytes]

  // Tells the others where `array` is, and an event: `of` has done what it has to do by now. If the
  // ranks are in different calls, all get an error.
  Status Meet(void* array, cudaEvent_t event, cudaStream_t of, std::vector<Visit>* visits) const {
    const Visit own = {array, event, caller.operation, args.n, args.entry_bytes};
    Status status = ToStatus(cudaEventRecord(event, of), "recording an event");
    if (status.ok()) {
      status = meeting.Meet(caller.member.rank, own, caller.config().timeout_s, visits);
    }
    for (size_t rank = 0; status.ok() && rank < visits->size(); ++rank) {
      const Visit& other = (*visits)[rank];
      if (other.IsOfCall(own)) continue;
      status = InvalidArgument("all ranks must make the same call; rank " + std::to_string(rank) +
                               " makes " + other.Call() + ", this one " + own.Call());
    }
    return status;
  }
};

Status WaitFor(const std::vector<Visit>& visits, cudaStream_t stream) {
  Status status;
  for (const Visit& visit : visits) {
    if (!status.ok()) break;
    status = ToStatus(cudaStreamWaitEvent(stream, visit.event), "waiting for a rank");
  }
  return status;
}

// Operands: the coordinate, an array [*, w], entries [R, n], and perhaps the result so far [n, w].
// Result: [n, w].
Status Read(const BufferList& operands, const BufferList& results, CopiesCall& call) {
  Status status;
  BufferReader operand_reader(operands, status), result_reader(results, status);
  CopiesArgs& args = call.args;
  args.rank = call.caller.member.rank;
  args.n_ranks = static_cast<int32_t>(call.caller.config().n_ranks);
  args.n_from = operand_reader.Dim(1, 0);
  args.n = operand_reader.Dim(2, 1);
  const ffi::DataType type = operand_reader.Type(1);
  const int64_t width = operand_reader.Dim(1, 1);
  operand_reader.Next<int32_t>("coordinate", {});
  call.array = static_cast<uint8_t*>(operand_reader.Next("the array", type, {args.n_from, width}));
  args.entries = operand_reader.Next<int32_t>("entries", {args.n_ranks, args.n});
  const void* kept = nullptr;
  if (operands.Find(3) != nullptr) {
    kept = operand_reader.Next("the result so far", type, {args.n, width});
  }
  operand_reader.ExpectEnd("operands");
  args.out = static_cast<uint8_t*>(result_reader.Next("the result", type, {args.n, width}));
  result_reader.ExpectEnd("results");
  if (!status.ok()) return status;
  args.entry_bytes = width * static_cast<int64_t>(ffi::ByteWidth(type));
  if (args.entry_bytes % kVectorBytes != 0 || args.n_ranks > kMaxCopyRanks ||
      args.n * (args.n_ranks + 1) > kMaxCopyEntries) {
    return InvalidArgument("entries must be multiples of 16 bytes, of few ranks; got " +
                           std::to_string(args.entry_bytes) + " bytes, " +
                           std::to_string(args.n_ranks) + " ranks and " + std::to_string(args.n) +
                           " entries");
  }
  if (kept == nullptr || kept == args.out) return {};
  // XLA makes the call work on slices of larger arrays.
  return ToStatus(cudaMemcpyAsync(args.out, kept, args.n * args.entry_bytes,
                                  cudaMemcpyDeviceToDevice, call.stream),
                  "copying the result so far");
}

// Operands: the coordinate, an array [*, w] that was sent, what is received [n, w], and one that
// stands for the order of calls. Result: what is received.
Status ReadReceived(const BufferList& operands, const BufferList& results, CopiesCall& call) {
  Status status;
  BufferReader operand_reader(operands, status), result_reader(results, status);
  CopiesArgs& args = call.args;
  const ffi::DataType type = operand_reader.Type(1);
  const int64_t width = operand_reader.Dim(1, 1);
  args.n_ranks = static_cast<int32_t>(call.caller.config().n_ranks);
  args.n_from = operand_reader.Dim(1, 0);
  args.n = operand_reader.Dim(2, 0);
  args.entry_bytes = width * static_cast<int64_t>(ffi::ByteWidth(type));
  operand_reader.Next<int32_t>("coordinate", {});
  call.array = static_cast<uint8_t*>(operand_reader.Next("the array", type, {args.n_from, width}));
  const void* const begun = operand_reader.Next("what is received", type, {args.n, width});
  args.out = static_cast<uint8_t*>(result_reader.Next("the result", type, {args.n, width}));
  result_reader.ExpectEnd("results");
  if (status.ok() && begun != args.out) status = Internal("XLA has moved what is received");
  return status;
}

// Copies that the engines of a device start together.
struct Copies {
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<size_t> bytes;

  Status Start(cudaStream_t stream) {
    cudaError_t error = cudaSuccess;
#if CUDART_VERSION >= 13000
    if (to.empty()) return {};
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    size_t first = 0;
    error = cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), to.size(), &attributes,
                                 &first, 1, stream);
#else
    for (size_t i = 0; error == cudaSuccess && i < to.size(); ++i) {
      error = cudaMemcpyAsync(to[i], from[i], bytes[i], cudaMemcpyDefault, stream);
    }
#endif
    return ToStatus(error, "starting copies of experts");
  }
};

// What this rank sends, none beyond its array.
Copies ListCopies(const Sending& sending, const CopiesArgs& args) {
  Copies copies;
  for (int64_t i = 0; i < args.n_ranks * args.n; ++i) {
    const int64_t entry = sending.own.entries[i];
    if (entry < 0 || entry >= args.n_from) continue;
    auto* const out = static_cast<uint8_t*>(sending.visits[i / args.n].array);
    copies.to.push_back(out + i % args.n * args.entry_bytes);
    copies.from.push_back(sending.array + entry * args.entry_bytes);
    copies.bytes.push_back(static_cast<size_t>(args.entry_bytes));
  }
  return copies;
}

// Begins to send entries of the array to each rank's result.
Status Send(CopiesCall& call) {
  const CopiesArgs& args = call.args;
  Sending sending;
  sending.array = call.array;
  const size_t n_bytes = args.n_ranks * args.n * sizeof(int32_t);
  Status status = call.engine.Take(&sending.own);
  if (status.ok()) status = call.Meet(args.out, sending.own.ready, call.stream, &sending.visits);
  if (status.ok()) {
    status = ToStatus(cudaMemcpyAsync(sending.own.entries, args.entries, n_bytes,
                                      cudaMemcpyDeviceToHost, call.stream),
                      "reading which experts are lent");
  }
  if (status.ok()) {
    status = ToStatus(cudaEventRecord(sending.own.read, call.stream), "recording an event");
  }
  if (status.ok()) call.engine.Begin(args.out, std::move(sending));
  return status;
}

// Starts the copies that a call of Send has begun, as soon as the host knows them, and makes the
// stream wait for all ranks' copies.
Status Receive(CopiesCall& call) {
  const CopiesArgs& args = call.args;
  std::optional<Sending> sending = call.engine.End(args.out);
  if (!sending.has_value() || sending->array != call.array) {
    return Internal("XLA has moved what was sent, or nothing was");
  }
  const Resources& resources = sending->own;
  const cudaStream_t engine = call.engine.stream();
  Status status = ToStatus(cudaEventSynchronize(resources.read), "waiting for the plan");
  if (status.ok()) status = WaitFor(sending->visits, engine);
  if (status.ok()) status = ListCopies(*sending, args).Start(engine);
  std::vector<Visit> visits;
  if (status.ok()) status = call.Meet(nullptr, resources.done, engine, &visits);
  if (status.ok()) status = WaitFor(visits, call.stream);
  if (status.ok()) call.engine.GiveBack(resources);
  return status;
}

Status Add(CopiesCall& call, RowType type) {
  Resources resources;
  std::vector<Visit> visits;
  Status status = call.engine.Take(&resources);
  if (status.ok()) status = call.Meet(call.array, resources.ready, call.stream, &visits);
  if (status.ok()) status = WaitFor(visits, call.stream);
  if (!status.ok()) return status;
  for (size_t rank = 0; rank < visits.size(); ++rank) {
    call.args.arrays[rank] = static_cast<const uint8_t*>(visits[rank].array);
  }
  if (call.args.n > 0) {
    status = ToStatus(LaunchAddCopies(call.args, type, call.stream), "launching the kernel");
  }
  // XLA may give the array to others once no rank reads it.
  if (status.ok()) status = call.Meet(nullptr, resources.done, call.stream, &visits);
  if (status.ok()) status = WaitFor(visits, call.stream);
  if (status.ok()) call.engine.GiveBack(resources);
  return status;
}

// Makes a call in the stream's order, once read(operands, results, call) has filled its arguments.
template <class Read, class Run>
ffi::Error RunInOrder(const char* operation, std::string_view group, cudaStream_t stream,
                      int32_t ordinal, StreamOrder order, ffi::RemainingArgs operands,
                      ffi::RemainingRets results, const Read& read, const Run& run) {
  Caller caller{operation, group};
  Status status = FindCaller(ordinal, caller);
  if (!status.ok()) return ToError(status);
  CopyEngine& engine = Meetings::Instance().EngineOf(ordinal);
  const auto meeting = Meetings::Instance().Find(caller.member.group);
  CopiesCall call{caller, stream, engine, *meeting, {}, nullptr};
  const cudaError_t error = LaunchInOrder(ordinal, stream, order, [&](cudaEvent_t) {
    status = engine.Open();
    if (status.ok()) status = read(BufferList(operands), BufferList(results), call);
    if (status.ok()) status = run(call);
    return cudaSuccess;
  });
  if (!status.ok()) return InvalidOperands(caller, status);
  return ToError(error, operation);
}

ffi::Error SendImpl(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                    ffi::RemainingArgs operands, ffi::RemainingRets results, std::string_view group,
                    StreamOrder order) {
  return RunInOrder("sending copies of experts", group, stream, ordinal, order, operands, results,
                    Read, Send);
}

ffi::Error ReceiveImpl(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                       ffi::RemainingArgs operands, ffi::RemainingRets results,
                       std::string_view group, StreamOrder order) {
  return RunInOrder("receiving copies of experts", group, stream, ordinal, order, operands, results,
                    ReadReceived, Receive);
}

ffi::Error AddImpl(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                   ffi::RemainingArgs operands, ffi::RemainingRets results, std::string_view group,
                   StreamOrder order) {
  const BufferList buffers(operands);
  const ffi::AnyBuffer* const array = buffers.Find(1);
  const auto type = array == nullptr ? std::nullopt : ToRowType(array->element_type());
  return RunInOrder("adding gradients of copies of experts", group, stream, ordinal, order,
                    operands, results, Read, [&](CopiesCall& call) {
                      return type.has_value() ? Add(call, *type)
                                              : InvalidArgument("the array must be of floats");
                    });
}

auto Bind() {
  return BindGroupCall().RemainingRets().Attr<std::string_view>("group").Attr<StreamOrder>(
      "stream_order");
}

}  // namespace

// Not captured: ranks meet on the host in every run.
JAX_EP_DEFINE_TARGET("jax_ep_send_copies", CudaSendCopies, SendImpl, Bind());
JAX_EP_DEFINE_TARGET("jax_ep_receive_copies", CudaReceiveCopies, ReceiveImpl, Bind());
JAX_EP_DEFINE_TARGET("jax_ep_add_copies", CudaAddCopies, AddImpl, Bind());

}  // namespace jax_ep::p2p
