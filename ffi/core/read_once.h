// Indices among the operands and results of a call. Who shares their memory with JAX may write it
// while the call runs. So what is checked must be what is followed: an index is read once, by an
// atomic load, which the compiler does not repeat.
#pragma once

#include <cstdint>
#include <vector>

namespace jax_ep {

template <class T>
T ReadOnce(const T& index) {
  return __atomic_load_n(&index, __ATOMIC_RELAXED);
}

// A copy of the `size` numbers at `indices`.
template <class T>
std::vector<T> ReadOnce(const T* indices, int64_t size) {
  std::vector<T> copy(size);
  for (int64_t i = 0; i < size; ++i) copy[i] = ReadOnce(indices[i]);
  return copy;
}

}  // namespace jax_ep
