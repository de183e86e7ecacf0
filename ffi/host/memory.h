// Page handling for large results. They come from fresh memory, where the first touch of a page
// costs more than the copy into it. So rows are written to a few huge pages.
#pragma once

#include <cstdint>

namespace jax_ep::host {

// Asks for huge pages behind the first `used_bytes` of a buffer of `bytes`, as NumPy does for its
// arrays. This is advice to the kernel: it changes no contents, and nothing depends on it.
void AdviseHugePages(void* buffer, int64_t used_bytes, int64_t bytes);

}  // namespace jax_ep::host
