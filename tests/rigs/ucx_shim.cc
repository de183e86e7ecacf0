// SPDX-License-Identifier: Apache-2.0
//
// Lets NVSHMEM's UCX transport connect processes of one machine that as_host.py has put on several
// hosts. Test code, loaded with LD_PRELOAD; never part of the package. It stands before
//
//   ucp_config_modify  by which NVSHMEM limits UCX to InfiniBand, or to shared memory: TCP instead
//   shm_open, shm_unlink
//                      by which the processes of a host find their heap in host memory, under one
//                      name for all hosts: a name for each host instead
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <string>

namespace {

// NVSHMEM says that all memory is a GPU's, so UCX copies with CUDA what it sends.
constexpr const char* kTransports = "tcp,cuda_copy,self";
constexpr const char* kHeapName = "sysmem_symm_heap";

template <class Function>
Function* Next(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

std::string OnThisHost(const char* name) {
  if (std::strstr(name, kHeapName) == nullptr) return name;
  char host[256] = {};
  gethostname(host, sizeof(host) - 1);
  return std::string(name) + "." + host;
}

}  // namespace

extern "C" int shm_open(const char* name, int flags, mode_t mode) {
  static auto* const next = Next(&shm_open, "shm_open");
  return next(OnThisHost(name).c_str(), flags, mode);
}

extern "C" int shm_unlink(const char* name) {
  static auto* const next = Next(&shm_unlink, "shm_unlink");
  return next(OnThisHost(name).c_str());
}

extern "C" int ucp_config_modify(void* config, const char* name, const char* value) {
  // NVSHMEM opens UCX for itself alone, so RTLD_NEXT does not find it.
  static auto* const next = reinterpret_cast<int (*)(void*, const char*, const char*)>(
      dlsym(dlopen("libucp.so.0", RTLD_LAZY | RTLD_NOLOAD), "ucp_config_modify"));
  return next(config, name, std::strcmp(name, "TLS") == 0 ? kTransports : value);
}
