// Shared by the handlers of the host transport: finding the caller, and arriving at the rendezvous.
// A handler finds its group, reads its operands and arrives. None blocks: each returns a future.
// Before it arrives it may throw, as it runs guarded (guard.h).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/status.h"
#include "host/call_site.h"
#include "host/future.h"
#include "host/group.h"
#include "host/guard.h"
#include "host/parallel.h"
#include "host/rank_args.h"
#include "host/rendezvous.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep::host {

// The context that XLA gives a handler besides its buffers and attributes. Lives as long as the
// handler runs.
struct Call {
  Operation operation;
  Runtime runtime;
  CallSite* site;
  ffi::RunId run;
  int32_t ordinal;
  ffi::ThreadPool* pool;
};

// Finds the group that is open in this process and the calling device in it; fills in RankArgs.
Status FindCaller(const Call& call, RankArgs& args);

// Checks that the device has the mesh coordinate, replica * R + rank, that the program gives it.
Status CheckCoordinate(const Call& call, int32_t coordinate, const RankArgs& args);

// Ends the run for all its ranks: a rank that failed never reaches later calls.
FutureOrError FailRun(const Call& call, Status status);

// Arrives at the rendezvous. The last rank does `work` and completes the futures of all.
using Work = void (*)(const Pool&, const std::vector<Arrival>&);
FutureOrError Meet(const Call& call, std::unique_ptr<RankArgs> args, Work work);

}  // namespace jax_ep::host
