// SPDX-License-Identifier: Apache-2.0
//
// Stands in for GDRCopy, libgdrapi.so.2, through which the CPU maps memory of a GPU. NVSHMEM's UCX
// transport needs it for signals. Test code for heaps in host memory, NVSHMEM_HEAP_KIND=SYSMEM: the
// CPU reaches them as they are, so every mapping is the memory itself. No driver is involved.
//
// Types and functions are those of GDRCopy's gdrapi.h that NVSHMEM looks up.
#include <cstddef>
#include <cstdint>
#include <cstring>

extern "C" {

struct gdr {};

// A pinned buffer, by its address.
struct gdr_mh_t {
  unsigned long address;
};

// Of what gdr_info_t holds, NVSHMEM reads the first field.
struct gdr_info_t {
  uint64_t va;
};

gdr* gdr_open() {
  static gdr instance;
  return &instance;
}
int gdr_close(gdr*) { return 0; }

// NVSHMEM accepts 2.x from the one on that it was built with.
void gdr_runtime_get_version(int* major, int* minor) {
  *major = 2;
  *minor = 99;
}
int gdr_driver_get_version(gdr*, int* major, int* minor) {
  gdr_runtime_get_version(major, minor);
  return 0;
}

int gdr_pin_buffer(gdr*, unsigned long address, size_t, uint64_t, uint32_t, gdr_mh_t* handle) {
  handle->address = address;
  return 0;
}
int gdr_unpin_buffer(gdr*, gdr_mh_t) { return 0; }

int gdr_map(gdr*, gdr_mh_t handle, void** mapped, size_t) {
  *mapped = reinterpret_cast<void*>(handle.address);
  return 0;
}
int gdr_unmap(gdr*, gdr_mh_t, void*, size_t) { return 0; }

int gdr_get_info(gdr*, gdr_mh_t handle, gdr_info_t* info) {
  info->va = handle.address;
  return 0;
}

int gdr_copy_to_mapping(gdr_mh_t, void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
  return 0;
}
int gdr_copy_from_mapping(gdr_mh_t, void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
  return 0;
}

}  // extern "C"
