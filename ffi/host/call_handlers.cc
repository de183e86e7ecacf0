// XLA FFI -> the calls of a group: their attributes are decoded once per call site, when XLA loads
// an executable; their operands are read and checked, before ranks meet.

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/routing.h"
#include "host/combine.h"
#include "host/dispatch.h"
#include "host/handler.h"
#include "xla/attributes.h"
#include "xla/handler.h"
#include "xla/read_operands.h"

namespace jax_ep::host {
namespace {

ffi::ErrorOr<std::unique_ptr<CallSite>> MakeDispatchSite(const DispatchAttributes& attributes) {
  auto site = std::make_unique<CallSite>();
  site->group = std::string(attributes.group);
  Status status =
      FindRowFormat(attributes.token_format, attributes.scales_layout, &site->row_format);
  if (status.ok()) return site;
  status.message = "dispatch of group " + site->group + ": " + status.message;
  return ffi::Unexpected(ToError(status));
}

ffi::ErrorOr<std::unique_ptr<CallSite>> MakeCombineSite(const CombineAttributes& attributes) {
  auto site = std::make_unique<CallSite>();
  site->group = std::string(attributes.group);
  site->mode = attributes.mode();
  return site;
}

ffi::ErrorOr<std::unique_ptr<CallSite>> MakeExchangeSite(const ExchangeAttributes& attributes) {
  auto site = std::make_unique<CallSite>();
  site->group = std::string(attributes.group);
  site->splits = attributes.splits;
  return site;
}

// A handler that first registers the type of its state, `CallSite`, when XLA asks for its metadata,
// as it does when it registers the handler. JAX has calls for both registrations, but before there
// is a CPU backend it queues them, and makes those of handlers first, which XLA then refuses.
template <XLA_FFI_Handler* kHandler>
XLA_FFI_Error* WithCallSiteType(XLA_FFI_CallFrame* frame) {
  static const XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<CallSite>();
  const auto* const extension = frame->extension_start;  // its type has several names
  const bool asks_for_metadata =
      extension != nullptr && extension->type == XLA_FFI_Extension_Metadata;
  if (asks_for_metadata) {
    XLA_FFI_Error* error =
        ffi::Ffi::RegisterTypeId(frame->api, "jax_ep.CallSite", &CallSite::id, &info);
    if (error != nullptr) return error;
  }
  return kHandler(frame);
}

// An exchange of bytes between the ranks of a group, for what the library shares besides tokens.
//
// XLA:CPU has collectives, but may start two of them in different orders on different ranks if one
// is inside of a conditional or a loop that waits for a call of the group. It then takes one for
// the other. Here, ranks meet by call site, in any order.
struct ExchangeArgs : RankArgs {
  const int32_t* coordinate;
  int64_t part_bytes;
  bool splits;
  const uint8_t* sent;  // a part for every rank or, unless it splits, one for all
  uint8_t* received;    // a part of every rank
};

// Once all ranks have arrived; `arrivals` by rank.
void ExchangeAll(const Pool& pool, const std::vector<Arrival>& arrivals) {
  const int64_t n_ranks = static_cast<int64_t>(arrivals.size());
  ParallelFor(pool, n_ranks * n_ranks, [&](int64_t pair) {
    const int64_t source = pair / n_ranks, destination = pair % n_ranks;
    const ExchangeArgs& from = ArgsAt<ExchangeArgs>(arrivals, source);
    const ExchangeArgs& to = ArgsAt<ExchangeArgs>(arrivals, destination);
    const uint8_t* const part = from.sent + (from.splits ? destination * from.part_bytes : 0);
    std::memcpy(to.received + source * from.part_bytes, part, from.part_bytes);
  });
}

// Checks that every choice with a row names a group, and that the row exists. Rows of another
// dispatch would be read, and written, out of bounds.
template <class Args>
Status CheckDstRows(const Args& args) {
  for (int64_t i = 0; i < args.n_tokens * args.sizes().n_choices; ++i) {
    const int32_t group = args.group_ids[i], row = args.handle[i];
    const bool has_group = IsGroup(group, args.sizes().n_groups);
    const bool has_row = row >= 0 && row < args.max_recv_tokens;
    if (row == kNoRow || (has_group && has_row)) continue;
    return InvalidArgument(
        "dispatched must be the unchanged result of a dispatch of this group; choice " +
        std::to_string(i) + " has group " + std::to_string(group) + " and row " +
        std::to_string(row));
  }
  return {};
}

// Checks that the offsets of groups rise from 0 to at most the rows there are. Those of another
// dispatch would have padding beyond the rows.
Status CheckRowOffsets(const CombineGradArgs& args) {
  const int64_t n_groups = args.sizes().n_local_groups();
  const uint32_t* const offsets = args.row_offsets;
  const bool rises = std::is_sorted(offsets, offsets + n_groups + 1);
  if (rises && offsets[0] == 0 && offsets[n_groups] <= args.max_recv_tokens) return {};
  return InvalidArgument(
      "dispatched must be the unchanged result of a dispatch of this group; row_offsets must rise "
      "from 0 to at most " +
      std::to_string(args.max_recv_tokens) + ", got " + std::to_string(offsets[0]) + " to " +
      std::to_string(offsets[n_groups]));
}

Status Read(const CallSite& site, const BufferList& operands, const BufferList& results,
            DispatchArgs& args) {
  return ReadDispatch(args.sizes(), Handle::kDstRows, site.row_format, operands, results, &args);
}
Status Read(const CallSite& site, const BufferList& operands, const BufferList& results,
            CombineArgs& args) {
  args.mode = site.mode;
  return ReadCombine(args.sizes(), Handle::kDstRows, site.mode, /*n_parts=*/1, operands, results,
                     &args);
}
Status Read(const CallSite& site, const BufferList& operands, const BufferList& results,
            CombineGradArgs& args) {
  args.mode = site.mode;
  return ReadCombineGrad(args.sizes(), Handle::kDstRows, site.mode, operands, results, &args);
}

Status Read(const CallSite& site, const BufferList& operands, const BufferList& results,
            ExchangeArgs& args) {
  Status status;
  BufferReader reader(operands, status), result_reader(results, status);
  const int64_t n_ranks = args.sizes().n_ranks, n_bytes = result_reader.Dim(0, 1);
  args.part_bytes = n_bytes;
  args.splits = site.splits;
  const Shape all = {n_ranks, n_bytes}, sent = site.splits ? all : Shape{n_bytes};
  args.coordinate = reader.Next<int32_t>("coordinate", {});
  args.sent = static_cast<const uint8_t*>(reader.Next("sent", ffi::U8, sent));
  reader.ExpectEnd("operands");
  args.received = static_cast<uint8_t*>(result_reader.Next("received", ffi::U8, all));
  result_reader.ExpectEnd("results");
  return status.ok() ? CheckDisjoint(operands, results) : status;
}

// Checks the values of operands, and does what a rank can do before the others have arrived.
Status Prepare(DispatchArgs& args) {
  PrepareEncoding(args);
  CountOwnChoices(args);
  return {};
}
Status Prepare(const ExchangeArgs&) { return {}; }
Status Prepare(const CombineArgs& args) { return CheckDstRows(args); }
Status Prepare(const CombineGradArgs& args) {
  const Status status = CheckDstRows(args);
  return status.ok() ? CheckRowOffsets(args) : status;
}

template <Operation kOperation, class Args, Work kWork>
FutureOrError Run(Runtime runtime, CallSite* site, ffi::RunId run, int32_t ordinal,
                  ffi::ThreadPool pool, ffi::RemainingArgs operands, ffi::RemainingRets results) {
  const Call call{kOperation, runtime, site, run, ordinal, &pool};
  auto args = std::make_unique<Args>();
  Status status = FindCaller(call, *args);
  if (status.ok()) status = Read(*site, BufferList(operands), BufferList(results), *args);
  if (status.ok()) status = CheckCoordinate(call, *args->coordinate, *args);
  if (status.ok()) status = Prepare(*args);
  if (!status.ok()) return FailRun(call, std::move(status));
  return Meet(call, std::move(args), kWork);
}

constexpr auto& kRunDispatch = Run<Operation::kDispatch, DispatchArgs, DispatchAll>;
constexpr auto& kRunCombine = Run<Operation::kCombine, CombineArgs, CombineAll>;
constexpr auto& kRunExchange = Run<Operation::kExchange, ExchangeArgs, ExchangeAll>;
constexpr auto& kRunGrad = Run<Operation::kCombineGrad, CombineGradArgs, CombineGradAll>;

auto Bind() {
  return ffi::Ffi::Bind()
      .Ctx<Runtime>()
      .Ctx<ffi::State<CallSite>>()
      .Ctx<ffi::RunId>()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::ThreadPool>()
      .RemainingArgs()
      .RemainingRets();
}

}  // namespace

JAX_EP_DEFINE_HANDLER_SYMBOL(HostInstantiateDispatch, "dispatch", MakeDispatchSite,
                             ffi::Ffi::BindInstantiate().Attrs<DispatchAttributes>());

JAX_EP_DEFINE_HANDLER_SYMBOL(HostInstantiateCombine, "combine", MakeCombineSite,
                             ffi::Ffi::BindInstantiate().Attrs<CombineAttributes>());

JAX_EP_DEFINE_HANDLER_SYMBOL(HostInstantiateExchange, "exchange", MakeExchangeSite,
                             ffi::Ffi::BindInstantiate().Attrs<ExchangeAttributes>());

JAX_EP_DEFINE_HANDLER_SYMBOL(HostDispatch, Operation::kDispatch, kRunDispatch, Bind());
JAX_EP_DEFINE_HANDLER_SYMBOL(HostCombine, Operation::kCombine, kRunCombine, Bind());
JAX_EP_DEFINE_HANDLER_SYMBOL(HostExchange, Operation::kExchange, kRunExchange, Bind());
JAX_EP_DEFINE_HANDLER_SYMBOL(HostCombineGrad, Operation::kCombineGrad, kRunGrad, Bind());

static const Target kTargets[] = {
    {"jax_ep_dispatch", HostDispatch, WithCallSiteType<HostInstantiateDispatch>},
    {"jax_ep_combine", HostCombine, WithCallSiteType<HostInstantiateCombine>},
    {"jax_ep_combine_grad", HostCombineGrad, WithCallSiteType<HostInstantiateCombine>},
    {"jax_ep_exchange", HostExchange, WithCallSiteType<HostInstantiateExchange>},
};

}  // namespace jax_ep::host
