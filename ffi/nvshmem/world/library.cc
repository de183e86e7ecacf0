#include "nvshmem/world/library.h"

#include <dlfcn.h>

#include <tuple>

namespace jax_ep::rail {

std::string Version::ToString() const {
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
}

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

}  // namespace jax_ep::rail
