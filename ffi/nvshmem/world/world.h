// NVSHMEM in this process: all processes of the job, one GPU each; its symmetric heaps; and the
// kernels that use it. Several of these steps wait for the other processes, without a time limit:
// callers first make sure that all are there.
#pragma once

#include <cuda_runtime_api.h>
#include <nvshmem_host.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <iterator>
#include <optional>
#include <string>

#include "core/element_types.h"
#include "core/status.h"
#include "nvshmem/plan/rail_call.h"
#include "nvshmem/plan/rail_sum_calls.h"
#include "nvshmem/world/heap_list.h"

namespace jax_ep::rail {

// The functions that are called of NVSHMEM's host library, which is found at run time: nothing of
// it is needed to build or to import jax_ep's extension but its headers.
struct Library {
  decltype(&nvshmemx_vendor_get_version_info) vendor_get_version_info;
  decltype(&nvshmemx_init_status) init_status;
  decltype(&nvshmemx_get_uniqueid) get_uniqueid;
  decltype(&nvshmemx_set_attr_uniqueid_args) set_attr_uniqueid_args;
  decltype(&nvshmemx_hostlib_init_attr) hostlib_init_attr;
  decltype(&nvshmemx_culibrary_init) culibrary_init;
  decltype(&nvshmem_my_pe) my_pe;
  decltype(&nvshmem_n_pes) n_pes;
  decltype(&nvshmem_malloc) malloc;
  decltype(&nvshmem_ptr) ptr;
};

struct Version {
  int major, minor, patch;
  std::string ToString() const;
};

// What decides whether the exchange's kernels of several processes fit on a GPU at once.
struct GpuRoom {
  std::string uuid;  // hexadecimal
  int n_sms;         // that this process sees
  // Whether processes run kernels on it at the same time, by MPS; otherwise they take turns. True
  // if the driver is too old to say.
  bool has_mps;
};

// The room of a device.
Status FindRoom(int device, GpuRoom* room);

class World {
 public:
  static constexpr int kMaxNodes = 1024;
  using Duration = std::chrono::duration<double>;

  static World& Instance();

  // Opens the host library, once.
  Status Load(const std::string& path);
  const std::optional<Version>& version() const { return version_; }

  // The id by which all processes join, made by one of them.
  Status MakeId(std::string* id);
  // Joins, or finds that another library of this process has. Waits for all processes.
  Status Join(const std::string& id, int pe, int n_pes, int device);
  bool has_joined() const { return kernel_ != nullptr; }
  // The GPU that this process has joined with.
  int device() const { return device_; }

  // Allocates a heap; gives its number, which is the same in all processes if they make the same
  // calls. Waits for all processes.
  Status Allocate(size_t bytes, size_t* number);
  Heap heap(size_t number) const { return heaps_.Get(number); }
  // A heap's memory in another process; null if loads and stores do not reach it.
  uint8_t* Map(const Heap& heap, int pe) const;

  // Waits until the network has delivered what kernels of this process, which have ended, have
  // sent. False: it has not within the limit, or there is an error. The kernel that waits has no
  // limit: what waits for the device afterwards waits for it, too.
  bool Drain(Duration limit) const;

  // Calls without tiles launch nothing, but for a combine, whose other kernel counts its blocks.
  cudaError_t Launch(const RailCall& call, cudaStream_t stream) const;
  cudaError_t Launch(const RailCombineCall& call, cudaStream_t stream) const;
  cudaError_t Launch(const RailSumCall& call, cudaStream_t stream) const;

  // Whether a kernel may wait for the exchange's kernel while both run. Not where other
  // processes run kernels on the GPU at the same time, which could keep this exchange off it.
  bool can_overlap() const { return can_overlap_; }
  // Calls launch(side), whose kernels on `side` run beside its kernels on `stream`. They all follow
  // earlier work on `stream`, and later work on `stream` follows all of them.
  cudaError_t Fork(cudaStream_t stream, const std::function<cudaError_t(cudaStream_t)>& launch);

 private:
  Status Initialize(const std::string& id, int pe, int n_pes);
  Status LoadKernel();

  Library library_{};
  std::optional<Version> version_;
  int device_ = 0;
  static constexpr size_t kNumSumTypes = std::size(kSumTypes);
  cudaKernel_t kernel_ = nullptr, drain_kernel_ = nullptr;
  cudaKernel_t combine_kernels_[kNumSumTypes]{}, sum_kernels_[kNumSumTypes]{};  // by RowType
  HeapList heaps_;
  bool can_overlap_ = false;
};

}  // namespace jax_ep::rail
