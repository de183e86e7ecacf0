// SPDX-License-Identifier: Apache-2.0
//
// An all-to-all of CPU devices, built like the extension's handlers, that commits a fault on
// request. seeded_faults.py runs it to prove that the sanitizers report what they should.

#include <chrono>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

enum Fault : int64_t {
  kNone = 0,
  kOverflow = 1,        // writes past the end of a heap block
  kSignedOverflow = 2,  // undefined behavior
  kRace = 3,            // ranks increment a common number without a lock
  kCopyRace = 4,        // ranks copy into a common buffer without a lock
};

struct Arrival {
  const float* in;
  float* out;
  ffi::Promise promise;
};

struct CallSite {
  static ffi::TypeId id;
  std::mutex mutex;
  std::map<int64_t, std::map<int32_t, Arrival>> runs;  // run id -> rank -> its buffers
};

ffi::TypeId CallSite::id = {};

volatile int64_t common_number = 0;
char common_bytes[64];

void Commit(int64_t fault) {
  static volatile int64_t n = 10;
  if (fault == kOverflow) {
    std::unique_ptr<volatile char[]> block(new volatile char[n]);
    block[n] = 1;
  } else if (fault == kSignedOverflow) {
    n = std::numeric_limits<int64_t>::max();
    n = n + 1;
  } else if (fault == kRace || fault == kCopyRace) {
    const char bytes[sizeof(common_bytes)] = {};
    volatile size_t size = sizeof(bytes);
    for (int i = 0; i < 5; ++i) {
      if (fault == kRace) {
        common_number = common_number + 1;
      } else {
        std::memcpy(common_bytes, bytes, size);
      }
      // Without a pause, one thread could run all ranks one after the other.
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
}

ffi::ErrorOr<std::unique_ptr<CallSite>> Instantiate(int64_t, int64_t) {
  return std::make_unique<CallSite>();
}

ffi::Future AllToAll(ffi::BufferR1<ffi::F32> in, ffi::ResultBufferR1<ffi::F32> out, CallSite* site,
                     ffi::RunId run, int32_t rank, ffi::ThreadPool pool, int64_t n_ranks,
                     int64_t fault) {
  Commit(fault);
  ffi::Promise promise;
  ffi::Future future(promise);
  std::map<int32_t, Arrival> all;
  {
    std::lock_guard<std::mutex> lock(site->mutex);
    auto& arrivals = site->runs[run.run_id];
    arrivals.emplace(rank, Arrival{in.typed_data(), out->typed_data(), promise});
    if (static_cast<int64_t>(arrivals.size()) < n_ranks) return future;
    all = std::move(arrivals);
    site->runs.erase(run.run_id);
  }
  const size_t n = in.element_count() / n_ranks;
  for (auto& [to, receiver] : all) {
    for (auto& [from, sender] : all) {
      std::memcpy(receiver.out + from * n, sender.in + to * n, n * sizeof(float));
    }
  }
  for (auto& [to, receiver] : all) {
    pool.Schedule([done = receiver.promise]() mutable { done.SetAvailable(); });
  }
  return future;
}

XLA_FFI_TypeInfo type_info = ffi::MakeTypeInfo<CallSite>();

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    SeededInstantiate, Instantiate,
    ffi::Ffi::BindInstantiate().Attr<int64_t>("n_ranks").Attr<int64_t>("fault"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(SeededExecute, AllToAll,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::BufferR1<ffi::F32>>()
                                  .Ret<ffi::BufferR1<ffi::F32>>()
                                  .Ctx<ffi::State<CallSite>>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int64_t>("n_ranks")
                                  .Attr<int64_t>("fault"));

extern "C" void* SeededTypeId() { return &CallSite::id; }
extern "C" void* SeededTypeInfo() { return &type_info; }
