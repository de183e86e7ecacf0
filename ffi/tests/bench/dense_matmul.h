// One dense matmul of bfloat16 by cuBLAS, which is loaded when it is needed.
#pragma once

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdint>
#include <string>

#include "tests/unit/check.h"

namespace jax_ep::matmul {

class DenseMatmul {
 public:
  // Loads the libraries of a folder, for CUDA 13 or 12.
  DenseMatmul(const std::string& dir, cudaStream_t stream) {
    void* library = nullptr;
    for (const char* const version : {".so.13", ".so.12"}) {
      if (library != nullptr) break;
      dlopen((dir + "/libcublasLt" + version).c_str(), RTLD_NOW | RTLD_GLOBAL);
      library = dlopen((dir + "/libcublas" + version).c_str(), RTLD_NOW | RTLD_GLOBAL);
    }
    CHECK_EQ(library != nullptr, true);
    const auto create = reinterpret_cast<int (*)(void**)>(dlsym(library, "cublasCreate_v2"));
    multiply_ = reinterpret_cast<Multiply*>(dlsym(library, "cublasGemmEx"));
    const auto set_stream =
        reinterpret_cast<int (*)(void*, cudaStream_t)>(dlsym(library, "cublasSetStream_v2"));
    CHECK_EQ(create != nullptr && multiply_ != nullptr && set_stream != nullptr, true);
    CHECK_EQ(create(&handle_), 0);
    CHECK_EQ(set_stream(handle_, stream), 0);
  }

  // [m, k] x [k, n], or [n, k] transposed -> [m, n], all row-major.
  void Run(const void* lhs, const void* rhs, void* out, int m, int k, int n,
           bool is_transposed) const {
    constexpr int kBFloat16 = 14, kSumsInFloat32 = 68, kDefaultAlgorithm = -1;  // of cuBLAS
    const float alpha = 1, beta = 0;
    const int status =
        multiply_(handle_, is_transposed, 0, n, m, k, &alpha, rhs, kBFloat16, is_transposed ? k : n,
                  lhs, kBFloat16, k, &beta, out, kBFloat16, n, kSumsInFloat32, kDefaultAlgorithm);
    CHECK_EQ(status, 0);
  }

 private:
  using Multiply = int(void* handle, int transposes_a, int transposes_b, int m, int n, int k,
                       const void* alpha, const void* a, int a_type, int a_stride, const void* b,
                       int b_type, int b_stride, const void* beta, void* c, int c_type,
                       int c_stride, int compute_type, int algorithm);

  void* handle_ = nullptr;
  Multiply* multiply_ = nullptr;
};

}  // namespace jax_ep::matmul
