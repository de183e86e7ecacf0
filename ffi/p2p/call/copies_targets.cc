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

// What a rank tells the others: where its array is, and what they wait for before they use it.
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
  cudaEvent_t ready = nullptr, done = nullptr;
  int32_t* entries = nullptr;  // [kMaxCopyEntries], page-locked

  // On the current device.
  Status Create() {
    Status status =
        ToStatus(cudaMallocHost(&entries, kMaxCopyEntries * sizeof(int32_t)), "allocating memory");
    for (cudaEvent_t* const event : {&ready, &done}) {
      if (!status.ok()) break;
      status =
          ToStatus(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "creating an event");
    }
    return status;
  }
};

// What a rank has for the others, from the call that reads the plan to the one that sends.
struct Offer {
  Resources resources;
  CopiesArgs args{};
  const uint8_t* array = nullptr;
};

// Of a device: the stream of its copies to others, which run beside what XLA runs, and the calls in
// flight. Never destroyed, as few as there are devices. Its device is current.
class CopyEngine {
 public:
  Status Open() {
    std::lock_guard lock(mutex_);
    if (stream_ != nullptr) return {};
    return ToStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
                    "creating a stream for copies of experts");
  }
  cudaStream_t stream() const { return stream_; }

  // Until they are given back; not after an error, since others may wait for the events.
  Status Take(Resources* resources) {
    std::lock_guard lock(mutex_);
    if (free_.empty()) return resources->Create();
    *resources = free_.back();
    free_.pop_back();
    return {};
  }
  void GiveBack(const Resources& resources) {
    std::lock_guard lock(mutex_);
    free_.push_back(resources);
  }

  // Keeps an offer, by the memory in which its call receives those of others.
  void KeepOffer(const void* out, const Offer& offer) {
    std::lock_guard lock(mutex_);
    offers_[out] = offer;
  }
  // None: no call has made one.
  std::optional<Offer> TakeOffer(const void* out) {
    std::lock_guard lock(mutex_);
    const auto node = offers_.extract(out);
    return node.empty() ? std::nullopt : std::optional(node.mapped());
  }

 private:
  std::mutex mutex_;
  cudaStream_t stream_ = nullptr;
  std::vector<Resources> free_;
  std::map<const void*, Offer> offers_;
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
  CopiesArgs args{};
  uint8_t* array = nullptr;  // [args.n_from, args.entry_bytes]
  std::optional<RowType> type{};

  // Tells the others where `array` is, and the event that they wait for. If the ranks are in
  // different calls, all get an error.
  Status Meet(void* array, cudaEvent_t event, std::vector<Visit>* visits) const {
    const Visit own = {array, event, caller.operation, args.n, args.entry_bytes};
    Status status = meeting.Meet(caller.member.rank, own, caller.config().timeout_s, visits);
    for (size_t rank = 0; status.ok() && rank < visits->size(); ++rank) {
      const Visit& other = (*visits)[rank];
      if (other.IsOfCall(own)) continue;
      status = InvalidArgument("all ranks must make the same call; rank " + std::to_string(rank) +
                               " makes " + other.Call() + ", this one " + own.Call());
    }
    return status;
  }
};

Status Record(cudaEvent_t event, cudaStream_t stream) {
  return ToStatus(cudaEventRecord(event, stream), "recording an event");
}

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
  call.type = ToRowType(type);
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

// Operands: the coordinate, the array that is sent, what is received, and one that stands for the
// order of calls. Result: what is received.
Status ReadReceived(const BufferList& operands, const BufferList& results, CopiesCall& call) {
  const ffi::AnyBuffer *const array = operands.Find(1), *const received = operands.Find(2);
  const ffi::AnyBuffer* const out = results.Find(0);
  if (array == nullptr || received == nullptr || out == nullptr) {
    return InvalidArgument("there must be an array, and what is received");
  }
  call.array = static_cast<uint8_t*>(array->untyped_data());
  call.args.out = static_cast<uint8_t*>(out->untyped_data());
  const bool is_in_place = received->untyped_data() == out->untyped_data();
  return is_in_place ? Status{} : Internal("XLA has moved what is received");
}

// Starts copies that the engines of a device make together.
Status StartCopies(std::vector<void*>& to, std::vector<const void*>& from,
                   std::vector<size_t>& bytes, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
#if CUDART_VERSION >= 13000
  if (to.empty()) return {};
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  size_t first = 0;
  error = cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), to.size(), &attributes, &first,
                               1, stream);
#else
  for (size_t i = 0; error == cudaSuccess && i < to.size(); ++i) {
    error = cudaMemcpyAsync(to[i], from[i], bytes[i], cudaMemcpyDefault, stream);
  }
#endif
  return ToStatus(error, "starting copies of experts");
}

// Sends entries to the results of the others, whose order differs from rank to rank.
Status StartSending(const Offer& offer, const std::vector<Visit>& visits, cudaStream_t stream) {
  const CopiesArgs& args = offer.args;
  std::vector<void*> to;
  std::vector<const void*> from;
  for (int32_t step = 1; step <= args.n_ranks; ++step) {
    const int32_t rank = (args.rank + step) % args.n_ranks;
    auto* const out = static_cast<uint8_t*>(visits[static_cast<size_t>(rank)].array);
    for (int64_t i = 0; i < args.n; ++i) {
      const int64_t entry = offer.resources.entries[rank * args.n + i];
      if (entry < 0 || entry >= args.n_from) continue;
      to.push_back(out + i * args.entry_bytes);
      from.push_back(offer.array + entry * args.entry_bytes);
    }
  }
  std::vector<size_t> bytes(to.size(), static_cast<size_t>(args.entry_bytes));
  return StartCopies(to, from, bytes, stream);
}

// Reads the plan: which entries of the array go to each of each rank's result.
Status Send(CopiesCall& call) {
  const CopiesArgs& args = call.args;
  Offer offer{{}, args, call.array};
  Resources& resources = offer.resources;
  const size_t n_bytes = args.n_ranks * args.n * sizeof(int32_t);
  Status status = call.engine.Take(&resources);
  if (status.ok()) {
    status = ToStatus(cudaMemcpyAsync(resources.entries, args.entries, n_bytes,
                                      cudaMemcpyDeviceToHost, call.stream),
                      "reading which experts are lent");
  }
  if (status.ok()) status = Record(resources.ready, call.stream);
  if (status.ok()) call.engine.KeepOffer(args.out, offer);
  return status;
}

// Sends what has been offered once the host knows it, and makes the stream wait for what comes.
Status Receive(CopiesCall& call) {
  const std::optional<Offer> offer = call.engine.TakeOffer(call.args.out);
  if (!offer.has_value()) return Internal("nothing is sent to the memory of what is received");
  if (offer->array != call.array) return Internal("XLA has moved the weights that are sent");
  call.args = offer->args;
  const Resources& resources = offer->resources;
  const cudaStream_t engine = call.engine.stream();
  std::vector<Visit> visits;
  // Without a limit: all calls of groups that the device makes before have one.
  Status status = ToStatus(cudaEventSynchronize(resources.ready), "waiting for the plan");
  if (status.ok()) status = call.Meet(call.args.out, resources.ready, &visits);
  if (status.ok()) status = WaitFor(visits, engine);
  if (!status.ok()) return status;
  status = StartSending(*offer, visits, engine);
  const Status recorded = Record(resources.done, engine);
  if (status.ok()) status = recorded;
  // The engine reads the array until then, whatever becomes of the others.
  cudaStreamWaitEvent(call.stream, resources.done);
  if (status.ok()) status = call.Meet(nullptr, resources.done, &visits);
  if (status.ok()) status = WaitFor(visits, call.stream);
  if (status.ok()) call.engine.GiveBack(resources);
  return status;
}

Status Add(CopiesCall& call) {
  if (!call.type.has_value()) return InvalidArgument("the array must be of floats");
  Resources resources;
  std::vector<Visit> visits;
  Status status = call.engine.Take(&resources);
  if (status.ok()) status = Record(resources.ready, call.stream);
  if (status.ok()) status = call.Meet(call.array, resources.ready, &visits);
  if (status.ok()) status = WaitFor(visits, call.stream);
  if (!status.ok()) return status;
  for (size_t rank = 0; rank < visits.size(); ++rank) {
    call.args.arrays[rank] = static_cast<const uint8_t*>(visits[rank].array);
  }
  if (call.args.n > 0) {
    status = ToStatus(LaunchAddCopies(call.args, *call.type, call.stream), "launching the kernel");
  }
  // XLA may give the array to others once no rank reads it.
  if (status.ok()) status = Record(resources.done, call.stream);
  if (status.ok()) status = call.Meet(nullptr, resources.done, &visits);
  if (status.ok()) status = WaitFor(visits, call.stream);
  if (status.ok()) call.engine.GiveBack(resources);
  return status;
}

struct Operation {
  const char* name;
  Status (*read)(const BufferList& operands, const BufferList& results, CopiesCall& call);
  Status (*run)(CopiesCall& call);
};
constexpr Operation kSend = {"sending copies of experts", Read, Send};
constexpr Operation kReceive = {"receiving copies of experts", ReadReceived, Receive};
constexpr Operation kAdd = {"adding gradients of copies of experts", Read, Add};

// Makes a call in the stream's order.
template <const Operation& kOperation>
ffi::Error RunInOrder(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                      ffi::RemainingArgs operands, ffi::RemainingRets results,
                      std::string_view group, StreamOrder order) {
  Caller caller{kOperation.name, group};
  Status status = FindCaller(ordinal, caller);
  if (!status.ok()) return ToError(status);
  CopyEngine& engine = Meetings::Instance().EngineOf(ordinal);
  const auto meeting = Meetings::Instance().Find(caller.member.group);
  CopiesCall call{caller, stream, engine, *meeting};
  const cudaError_t error = LaunchInOrder(ordinal, stream, order, [&](cudaEvent_t) {
    status = engine.Open();
    if (status.ok()) status = kOperation.read(BufferList(operands), BufferList(results), call);
    if (status.ok()) status = kOperation.run(call);
    return cudaSuccess;
  });
  if (!status.ok()) return InvalidOperands(caller, status);
  return ToError(error, kOperation.name);
}

auto Bind() {
  return BindGroupCall().RemainingRets().Attr<std::string_view>("group").Attr<StreamOrder>(
      "stream_order");
}

}  // namespace

// Not captured: ranks meet on the host in every run.
JAX_EP_DEFINE_TARGET("jax_ep_send_copies", CudaSendCopies, RunInOrder<kSend>, Bind());
JAX_EP_DEFINE_TARGET("jax_ep_receive_copies", CudaReceiveCopies, RunInOrder<kReceive>, Bind());
JAX_EP_DEFINE_TARGET("jax_ep_add_copies", CudaAddCopies, RunInOrder<kAdd>, Bind());

}  // namespace jax_ep::p2p
