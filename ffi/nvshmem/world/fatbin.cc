#include "nvshmem/world/fatbin.h"

// CMake links the fatbin and says where it is.
asm(".section .rodata\n"
    ".balign 64\n"
    "jax_ep_rail_fatbin:\n"
    ".incbin \"" JAX_EP_RAIL_FATBIN
    "\"\n"
    ".byte 0\n"
    ".previous\n");

extern "C" __attribute__((visibility("hidden"))) const char jax_ep_rail_fatbin[];

namespace jax_ep::rail {

const void* RailFatbin() { return jax_ep_rail_fatbin; }

}  // namespace jax_ep::rail
