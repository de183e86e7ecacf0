// Python's access to NVSHMEM and to the rails of this process.
#pragma once

#include <nanobind/nanobind.h>

namespace jax_ep::rail {

// Adds the submodule `nvshmem`.
void DefineRails(nanobind::module_& module);

}  // namespace jax_ep::rail
