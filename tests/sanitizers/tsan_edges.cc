// SPDX-License-Identifier: Apache-2.0
//
// Tells ThreadSanitizer which events the XLA runtime orders. Test code, loaded by tsan_edges.py;
// never part of the package.
//
// jaxlib is not instrumented, so TSan does not see that a handler's state exists before the handler
// runs, or that a task is scheduled before it starts. Without help it reports each of these
// hand-overs as a race, and suppressing them would silence everything below the handlers. Instead,
// each handler is called through a trampoline that gives it a copy of XLA's function table, whose
// functions announce the hand-overs to TSan:
//
//   State_Set            happens before  State_Get of the same state
//   ThreadPool_Schedule  happens before  the task
//   a call's completion  happens before  later calls on the same device
//   every call and task  happens before  the destruction of a state
//
// Nothing else is assumed: the extension itself must order whatever two calls on two devices, or a
// call and a task, have in common. This file is compiled without -fsanitize=thread.

#include <sanitizer/tsan_interface.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>

#include "xla/ffi/api/c_api.h"

namespace {

constexpr int kMaxHandlers = 256;
constexpr int kMaxTypes = 64;
constexpr int kMaxDevices = 256;

using Deleter = void (*)(void*);

std::array<XLA_FFI_Handler*, kMaxHandlers> handlers;
std::array<Deleter, kMaxTypes> deleters;
std::array<XLA_FFI_TypeInfo, kMaxTypes> type_infos;
int num_handlers = 0;
int num_types = 0;

const XLA_FFI_Api* runtime = nullptr;  // XLA's own table
XLA_FFI_Api table;                     // the copy that handlers see

// Only the addresses of these matter: TSan keeps a clock for each.
char device_done[kMaxDevices];  // of each device
char all_done;                  // of all calls and tasks

std::map<XLA_FFI_Future*, int> future_devices;  // devices of futures that are not completed yet
std::atomic_flag future_devices_lock = ATOMIC_FLAG_INIT;
thread_local int current_device = -1;  // of the call that this thread is in; -1 = none

// A lock that TSan does not see. A std::mutex would order all calls.
class HiddenLock {
 public:
  explicit HiddenLock(std::atomic_flag* flag) : flag_(flag) {
    while (flag_->test_and_set(std::memory_order_acquire)) {
    }
  }
  ~HiddenLock() { flag_->clear(std::memory_order_release); }

 private:
  std::atomic_flag* flag_;
};

struct Task {
  XLA_FFI_Task* run;
  void* data;
};

XLA_FFI_Error* StateSet(XLA_FFI_State_Set_Args* args) {
  __tsan_release(args->state);
  return runtime->XLA_FFI_State_Set(args);
}

XLA_FFI_Error* StateGet(XLA_FFI_State_Get_Args* args) {
  XLA_FFI_Error* error = runtime->XLA_FFI_State_Get(args);
  if (error == nullptr) __tsan_acquire(args->state);
  return error;
}

void RunTask(void* data) {
  Task* task = static_cast<Task*>(data);
  __tsan_acquire(task);
  task->run(task->data);
  __tsan_release(&all_done);
  delete task;
}

XLA_FFI_Error* Schedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
  Task* task = new Task{args->task, args->data};
  __tsan_release(task);
  XLA_FFI_ThreadPool_Schedule_Args wrapped = *args;
  wrapped.task = RunTask;
  wrapped.data = task;
  XLA_FFI_Error* error = runtime->XLA_FFI_ThreadPool_Schedule(&wrapped);
  if (error != nullptr) delete task;
  return error;
}

XLA_FFI_Error* FutureCreate(XLA_FFI_Future_Create_Args* args) {
  XLA_FFI_Error* error = runtime->XLA_FFI_Future_Create(args);
  if (error == nullptr && current_device >= 0) {
    HiddenLock lock(&future_devices_lock);
    future_devices[args->future] = current_device;
  }
  return error;
}

void FutureCompleted(XLA_FFI_Future* future) {
  HiddenLock lock(&future_devices_lock);
  auto found = future_devices.find(future);
  if (found == future_devices.end()) return;
  __tsan_release(&device_done[found->second]);
  future_devices.erase(found);
}

XLA_FFI_Error* FutureSetAvailable(XLA_FFI_Future_SetAvailable_Args* args) {
  FutureCompleted(args->future);
  return runtime->XLA_FFI_Future_SetAvailable(args);
}

XLA_FFI_Error* FutureSetError(XLA_FFI_Future_SetError_Args* args) {
  FutureCompleted(args->future);
  return runtime->XLA_FFI_Future_SetError(args);
}

// A handler that registers the type of its state does so when it is asked for its metadata.
const XLA_FFI_TypeInfo* WrapType(const XLA_FFI_TypeInfo* info);

XLA_FFI_Error* TypeRegister(XLA_FFI_Type_Register_Args* args) {
  XLA_FFI_Type_Register_Args wrapped = *args;
  if (args->type_info != nullptr) wrapped.type_info = WrapType(args->type_info);
  return runtime->XLA_FFI_Type_Register(&wrapped);
}

std::atomic<bool> table_is_filled{false};
std::atomic_flag table_lock = ATOMIC_FLAG_INIT;

void FillTable(const XLA_FFI_Api* api) {
  if (table_is_filled.load(std::memory_order_acquire)) return;
  HiddenLock lock(&table_lock);
  runtime = api;
  table = *api;
  table.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  table.XLA_FFI_Type_Register = TypeRegister;
  table.XLA_FFI_State_Set = StateSet;
  table.XLA_FFI_State_Get = StateGet;
  table.XLA_FFI_ThreadPool_Schedule = Schedule;
  table.XLA_FFI_Future_Create = FutureCreate;
  table.XLA_FFI_Future_SetAvailable = FutureSetAvailable;
  table.XLA_FFI_Future_SetError = FutureSetError;
  table_is_filled.store(true, std::memory_order_release);
}

// The device of an execution; -1 for other stages.
int Device(const XLA_FFI_CallFrame* frame) {
  if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE || frame->ctx == nullptr) return -1;
  XLA_FFI_DeviceOrdinal_Get_Args args{};
  args.struct_size = XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE;
  args.ctx = frame->ctx;
  if (XLA_FFI_Error* error = runtime->XLA_FFI_DeviceOrdinal_Get(&args)) {
    XLA_FFI_Error_Destroy_Args destroy{};
    destroy.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
    destroy.error = error;
    runtime->XLA_FFI_Error_Destroy(&destroy);
    return -1;
  }
  return args.device_ordinal % kMaxDevices;
}

XLA_FFI_Error* Call(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame) {
  FillTable(frame->api);
  XLA_FFI_CallFrame copy = *frame;
  copy.api = &table;
  // A metadata query, which carries an extension, has no context and nothing to order.
  if (frame->extension_start != nullptr) return handler(&copy);
  const int device = Device(frame);
  const int outer_device = std::exchange(current_device, device);
  if (device >= 0) __tsan_acquire(&device_done[device]);
  XLA_FFI_Error* error = handler(&copy);
  if (device >= 0 && copy.future == nullptr) __tsan_release(&device_done[device]);
  __tsan_release(&all_done);
  current_device = outer_device;
  frame->future = copy.future;
  return error;
}

template <size_t kIndex>
XLA_FFI_Error* Trampoline(XLA_FFI_CallFrame* frame) {
  return Call(handlers[kIndex], frame);
}

template <size_t kIndex>
void Delete(void* object) {
  __tsan_acquire(&all_done);
  deleters[kIndex](object);
}

template <size_t... kIndices>
constexpr std::array<XLA_FFI_Handler*, sizeof...(kIndices)> Trampolines(
    std::index_sequence<kIndices...>) {
  return {Trampoline<kIndices>...};
}

template <size_t... kIndices>
constexpr std::array<Deleter, sizeof...(kIndices)> Deletes(std::index_sequence<kIndices...>) {
  return {Delete<kIndices>...};
}

// The type, but with a deleter that acquires what calls have released; null if there are too many
// types.
const XLA_FFI_TypeInfo* WrapType(const XLA_FFI_TypeInfo* info) {
  static constexpr auto kDeletes = Deletes(std::make_index_sequence<kMaxTypes>());
  if (num_types == kMaxTypes) return nullptr;
  deleters[num_types] = info->deleter;
  type_infos[num_types] = *info;
  type_infos[num_types].deleter = kDeletes[num_types];
  return &type_infos[num_types++];
}

}  // namespace

// Returns a handler that calls `handler` as described above; null if there are too many.
extern "C" XLA_FFI_Handler* TsanEdgesWrapHandler(XLA_FFI_Handler* handler) {
  static constexpr auto kTrampolines = Trampolines(std::make_index_sequence<kMaxHandlers>());
  if (num_handlers == kMaxHandlers) return nullptr;
  handlers[num_handlers] = handler;
  return kTrampolines[num_handlers++];
}

// Does the same for the type of a state.
extern "C" const XLA_FFI_TypeInfo* TsanEdgesWrapType(const XLA_FFI_TypeInfo* info) {
  return WrapType(info);
}
