// NVSHMEM's host library, found at run time: nothing of it is needed to build or to import jax_ep's
// extension but its headers.
#pragma once

#include <nvshmem_host.h>

#include <string>

#include "core/status.h"

namespace jax_ep::rail {

// Its functions that are called.
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

// Opens libnvshmem_host.so.3 at `path`. Fails if it is missing or too old.
Status LoadLibrary(const std::string& path, Library* library, Version* version);

}  // namespace jax_ep::rail
