#include "nvshmem/world/world.h"

#include <dlfcn.h>

#include <cstring>
#include <mutex>
#include <optional>
#include <thread>
#include <tuple>
#include <type_traits>
#include <vector>

#include "nvshmem/world/launch.h"
#include "p2p/launch/cuda_status.h"
#include "p2p/open/peer_memory.h"

// The linked kernels that use NVSHMEM, as bytes. CMake links them and says where they are.
asm(".section .rodata\n"
    ".balign 64\n"
    "jax_ep_rail_fatbin:\n"
    ".incbin \"" JAX_EP_RAIL_FATBIN
    "\"\n"
    ".byte 0\n"
    ".previous\n");

extern "C" __attribute__((visibility("hidden"))) const char jax_ep_rail_fatbin[];

namespace jax_ep::rail {
namespace {

using p2p::ScopedDevice;
using p2p::ToStatus;

// Statuses of nvshmemx_init_status from this one on are of a library that can be used.
constexpr int kInitialized = NVSHMEM_STATUS_IS_INITIALIZED;

// Opens libnvshmem_host.so.3 at `path`. Fails if it is missing or too old.
Status LoadLibrary(const std::string& path, Library* library, Version* version) {
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    return FailedPrecondition("NVSHMEM's host library cannot be opened: " + std::string(dlerror()));
  }
  std::string missing;
  const auto find = [&](const char* name, auto& function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    if (function == nullptr) missing = name;
  };
  find("nvshmemx_vendor_get_version_info", library->vendor_get_version_info);
  find("nvshmemx_init_status", library->init_status);
  find("nvshmemx_get_uniqueid", library->get_uniqueid);
  find("nvshmemx_set_attr_uniqueid_args", library->set_attr_uniqueid_args);
  find("nvshmemx_hostlib_init_attr", library->hostlib_init_attr);
  find("nvshmemx_culibrary_init", library->culibrary_init);
  find("nvshmem_my_pe", library->my_pe);
  find("nvshmem_n_pes", library->n_pes);
  find("nvshmem_malloc", library->malloc);
  find("nvshmem_ptr", library->ptr);
  if (!missing.empty()) return FailedPrecondition(path + " lacks the function " + missing + ".");
  library->vendor_get_version_info(&version->major, &version->minor, &version->patch);
  // Device code runs with host libraries of the same major version that are at least as new.
  constexpr Version built{NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION,
                          NVSHMEM_VENDOR_PATCH_VERSION};
  if (version->major != built.major ||
      std::tie(version->minor, version->patch) < std::tie(built.minor, built.patch)) {
    return FailedPrecondition("NVSHMEM must be version " + built.ToString() +
                              " or a later one of major version " + std::to_string(built.major) +
                              "; got " + version->ToString() + " (" + path + ").");
  }
  return {};
}

// Whether processes run kernels on the device at the same time. Older drivers cannot say.
bool HasMps(int device) {
  int has_mps = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&has_mps, cudaDevAttrMpsEnabled, device);
  if (error != cudaSuccess) cudaGetLastError();
  return error != cudaSuccess || has_mps != 0;
}

// cudaErrorNotReady: the stream has work left after the limit.
cudaError_t Wait(cudaStream_t stream, World::Duration limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  cudaError_t error = cudaStreamQuery(stream);
  while (error == cudaErrorNotReady && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    error = cudaStreamQuery(stream);
  }
  return error;
}

// Sides that ended threads have left.
class IdleSides {
 public:
  // Never destroyed: threads may end, and leave theirs, after static objects.
  static IdleSides& Instance() {
    static IdleSides* const instance = new IdleSides;
    return *instance;
  }

  void Leave(const Side& side) {
    const std::lock_guard<std::mutex> lock(mutex_);
    sides_.push_back(side);
  }

  std::optional<Side> Take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (sides_.empty()) return std::nullopt;
    const Side side = sides_.back();
    sides_.pop_back();
    return side;
  }

 private:
  std::mutex mutex_;
  std::vector<Side> sides_;
};

// The calling thread's, which may be capturing while others launch: that could forbid it to make
// streams.
class SideOfThread {
 public:
  static cudaError_t Find(Side* side) {
    thread_local SideOfThread own;
    if (!own.side_) own.side_ = IdleSides::Instance().Take();
    const cudaError_t error = own.side_ ? cudaSuccess : own.Make();
    if (error == cudaSuccess) *side = *own.side_;
    return error;
  }

  ~SideOfThread() {
    if (side_) IdleSides::Instance().Leave(*side_);
  }

 private:
  SideOfThread() = default;

  cudaError_t Make() {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
    if (error != cudaSuccess) return error;
    Side side;
    error = side.Make();
    if (error == cudaSuccess) side_ = side;
    cudaThreadExchangeStreamCaptureMode(&mode);
    return error;
  }

  std::optional<Side> side_;
};

}  // namespace

std::string Version::ToString() const {
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
}

Status FindRoom(int device, GpuRoom* room) {
  cudaUUID_t uuid;
  Status status = p2p::DeviceUuid(device, &uuid);
  if (!status.ok()) return status;
  constexpr char kDigits[] = "0123456789abcdef";
  for (const char byte : uuid.bytes) {
    room->uuid += {kDigits[static_cast<uint8_t>(byte) >> 4], kDigits[byte & 15]};
  }
  room->has_mps = HasMps(device);
  return ToStatus(cudaDeviceGetAttribute(&room->n_sms, cudaDevAttrMultiProcessorCount, device),
                  "querying device " + std::to_string(device));
}

World& World::Instance() {
  static World* const instance = new World;
  return *instance;
}

Status World::Load(const std::string& path) {
  if (version_) return {};
  Version version;
  const Status status = LoadLibrary(path, &library_, &version);
  if (status.ok()) version_ = version;
  return status;
}

Status World::MakeId(std::string* id) {
  nvshmemx_uniqueid_t made = NVSHMEMX_UNIQUEID_INITIALIZER;
  const int error = library_.get_uniqueid(&made);
  if (error != 0) return Internal("NVSHMEM made no id of the job: error " + std::to_string(error));
  id->assign(reinterpret_cast<const char*>(&made), sizeof(made));
  return {};
}

Status World::Join(const std::string& id, int pe, int n_pes, int device) {
  if (has_joined()) return {};
  device_ = device;
  const ScopedDevice scoped(device);
  Status status = ToStatus(cudaFree(nullptr), "starting CUDA");  // NVSHMEM takes the current device
  if (status.ok() && library_.init_status() < kInitialized) status = Initialize(id, pe, n_pes);
  if (!status.ok()) return status;
  if (library_.n_pes() != n_pes || library_.my_pe() != pe) {
    return FailedPrecondition("another library of this process has initialized NVSHMEM as number " +
                              std::to_string(library_.my_pe()) + " of " +
                              std::to_string(library_.n_pes()) + " processes; it must be number " +
                              std::to_string(pe) + " of " + std::to_string(n_pes) +
                              ", as in jax.distributed.");
  }
  can_overlap_ = !HasMps(device_);
  return LoadKernel();
}

Status World::Initialize(const std::string& id, int pe, int n_pes) {
  nvshmemx_uniqueid_t job;
  if (id.size() != sizeof(job)) return InvalidArgument("the id of the job has the wrong size.");
  std::memcpy(&job, id.data(), sizeof(job));
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  library_.set_attr_uniqueid_args(pe, n_pes, &job, &attributes);
  const int error = library_.hostlib_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes);
  if (error != 0) {
    return Internal("NVSHMEM was not initialized: error " + std::to_string(error) +
                    ". NVSHMEM_DEBUG=INFO in the environment shows why.");
  }
  // Also without a way to reach other processes, the call succeeds; the next one then exits.
  if (library_.init_status() < kInitialized) {
    return FailedPrecondition(
        "NVSHMEM finds no way from this GPU to those of the other processes: neither loads and "
        "stores nor a network that it supports. NVSHMEM_DEBUG=INFO in the environment shows what "
        "it tried.");
  }
  return {};
}

Status World::LoadKernel() {
  cudaLibrary_t code;
  Status status = ToStatus(
      cudaLibraryLoadData(&code, jax_ep_rail_fatbin, nullptr, nullptr, 0, nullptr, nullptr, 0),
      "loading the kernels that use NVSHMEM");
  if (!status.ok()) return status;
  const int error = library_.culibrary_init(reinterpret_cast<CUlibrary>(code));
  if (error != 0) {
    return Internal("NVSHMEM does not accept the kernels: error " + std::to_string(error));
  }
  for (size_t i = 0; i < kNumSumTypes; ++i) {
    status = FindKernel(code, kCombineKernels[i], &combine_kernels_[i]);
    if (status.ok()) status = FindKernel(code, kSumKernels[i], &sum_kernels_[i]);
    if (!status.ok()) return status;
  }
  status = FindKernel(code, kDrainKernel, &drain_kernel_);
  return status.ok() ? FindKernel(code, kExchangeKernel, &kernel_) : status;
}

Status World::Allocate(size_t bytes, size_t* number) {
  const ScopedDevice scoped(device_);
  Heap heap{static_cast<uint8_t*>(library_.malloc(bytes)), bytes, nullptr, nullptr};
  if (heap.base == nullptr) {
    return Internal(
        "NVSHMEM has no " + std::to_string(bytes) +
        " bytes left. They are not part of the memory that JAX preallocates: lower "
        "XLA_PYTHON_CLIENT_MEM_FRACTION. Where NVSHMEM reserves all of its memory at the "
        "start, raise NVSHMEM_SYMMETRIC_SIZE.");
  }
  Status status =
      ToStatus(cudaMalloc(reinterpret_cast<void**>(&heap.state), sizeof(RailState)), "allocating");
  if (status.ok()) {
    status = ToStatus(cudaMalloc(reinterpret_cast<void**>(&heap.peers), kMaxNodes * sizeof(Peer)),
                      "allocating");
  }
  if (!status.ok()) return status;
  *number = heaps_.Add(heap);
  return {};
}

uint8_t* World::Map(const Heap& heap, int pe) const {
  return static_cast<uint8_t*>(library_.ptr(heap.base, pe));
}

bool World::Drain(Duration limit) const {
  const ScopedDevice scoped(device_);
  cudaStream_t stream;
  cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error == cudaSuccess) {
    cudaLaunchConfig_t config{};
    config.gridDim = config.blockDim = dim3(1);
    config.stream = stream;
    error = cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(drain_kernel_), nullptr);
    if (error == cudaSuccess) error = Wait(stream, limit);
    cudaStreamDestroy(stream);  // a kernel that still waits keeps it
  }
  if (error != cudaSuccess) cudaGetLastError();
  return error == cudaSuccess;
}

cudaError_t World::Launch(const RailCall& call, cudaStream_t stream) const {
  if (call.tiles.n_tiles == 0) return cudaSuccess;
  return LaunchKernel(kernel_, &call, 0, stream);
}

cudaError_t World::Launch(const RailCombineCall& call, cudaStream_t stream) const {
  const cudaKernel_t kernel = combine_kernels_[static_cast<int>(call.combine.row_type)];
  return LaunchKernel(kernel, &call, CombineSmemBytes(call), stream);
}

cudaError_t World::Launch(const RailSumCall& call, cudaStream_t stream) const {
  if (call.rail.tiles.n_tiles == 0) return cudaSuccess;
  const cudaKernel_t kernel = sum_kernels_[static_cast<int>(call.row_type)];
  return LaunchKernel(kernel, &call, SumSmemBytes(call.rail), stream);
}

cudaError_t World::Fork(cudaStream_t stream,
                        const std::function<cudaError_t(cudaStream_t)>& launch) {
  Side side;
  const cudaError_t error = SideOfThread::Find(&side);
  return error == cudaSuccess ? side.Fork(stream, launch) : error;
}

}  // namespace jax_ep::rail
