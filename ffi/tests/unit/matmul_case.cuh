// A grouped matmul on a GPU with random operands, run and checked.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "layer/matmul/kernels.h"
#include "layer/matmul/matmul_call.h"
#include "tests/unit/check.h"
#include "tests/unit/matmul_reference.cuh"

namespace jax_ep::matmul {

constexpr size_t kGuardBytes = 1024;
constexpr unsigned kTestBlocks = 4096;

inline void ExpectSuccess(const std::string& what, cudaError_t error) {
  CHECK_EQ(what + ": " + cudaGetErrorString(error), what + ": no error");
}

// Device memory full of canaries, with more of them at its end.
class Buffer {
 public:
  explicit Buffer(size_t size) : size_(size) {
    ExpectSuccess("cudaMalloc", cudaMalloc(&data_, size + kGuardBytes));
    ExpectSuccess("cudaMemset", cudaMemset(data_, kCanary, size + kGuardBytes));
  }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;

  template <class T>
  T* As() const {
    return static_cast<T*>(data_);
  }

  size_t size() const { return size_; }
  uint8_t* guard() const { return As<uint8_t>() + size_; }

 private:
  size_t size_;
  void* data_ = nullptr;
};

// `b` null: all of `a` are canaries.
inline void ExpectSameBytes(const std::string& what, const uint8_t* a, const uint8_t* b,
                            size_t size) {
  const Buffer counter(sizeof(unsigned));
  unsigned n_different = 0;
  ExpectSuccess(what, cudaMemset(counter.As<void>(), 0, sizeof(n_different)));
  CountDifferences<<<kTestBlocks, kTestThreads>>>(a, b, static_cast<int64_t>(size),
                                                  counter.As<unsigned>());
  ExpectSuccess(
      what, cudaMemcpy(&n_different, counter.As<void>(), sizeof(n_different), cudaMemcpyDefault));
  CHECK_EQ(what + ": " + std::to_string(n_different) + " bytes differ", what + ": 0 bytes differ");
}

// A launch of kernels.h as a backend.
template <cudaError_t (*kLaunch)(const MatmulCall&, LaunchMode)>
cudaError_t OnStream(const MatmulCall& call, cudaStream_t stream) {
  return kLaunch(call, stream);
}

struct Backend {
  std::string name;
  cudaError_t (*launch)(const MatmulCall&, cudaStream_t);
  bool takes_e4m3;
};

struct Shape {
  std::string name;
  std::vector<uint32_t> row_offsets;
  int64_t n_rows, k, n;

  int64_t n_groups() const { return static_cast<int64_t>(row_offsets.size()) - 1; }
  int64_t n_used() const { return std::min(int64_t{row_offsets.back()}, n_rows); }
};

inline Shape MakeShape(const std::string& name, const std::vector<uint32_t>& sizes,
                       int64_t n_unused, int64_t k, int64_t n) {
  Shape shape{name, {0}, 0, k, n};
  for (const uint32_t size : sizes) shape.row_offsets.push_back(shape.row_offsets.back() + size);
  shape.n_rows = shape.row_offsets.back() + n_unused;
  return shape;
}

struct Variant {
  MatmulForm form;
  Element element;
  RowType out_type;
  bool zeroes_unused;
  bool accumulates = false;
};

inline std::string Describe(const Backend& backend, const Shape& shape, const Variant& variant) {
  std::ostringstream text;
  text << backend.name << ", " << shape.name << ": form " << static_cast<int>(variant.form) << ", "
       << Name(variant.element) << " to type " << static_cast<int>(variant.out_type)
       << (variant.zeroes_unused ? ", zeroes unused" : "")
       << (variant.accumulates ? ", accumulates" : "") << ", C " << shape.n_rows << ", L "
       << shape.n_groups() << ", k " << shape.k << ", n " << shape.n;
  return text.str();
}

// The operands of a call, and two results of it.
class DeviceCase {
 public:
  DeviceCase(const Shape& shape, const Variant& variant, uint32_t seed)
      : call_(MakeCall(shape, variant)),
        lhs_(call_.n_rows * call_.k * InputBytes()),
        rhs_(RhsElements() * InputBytes()),
        row_offsets_(shape.row_offsets.size() * sizeof(uint32_t)),
        lhs_scales_(NumScaleBlocks(call_.k) * call_.n_rows * sizeof(float)),
        rhs_scales_(call_.n_groups * NumScaleBlocks(call_.n) * NumScaleBlocks(call_.k) *
                    sizeof(float)),
        out_(OutBytes()),
        again_(OutBytes()),
        workspace_(MatmulWorkspaceBytes(call_.n_groups)),
        finding_(sizeof(Finding)) {
    Fill(shape, seed);
    call_.lhs = lhs_.As<void>();
    call_.rhs = rhs_.As<void>();
    call_.row_offsets = row_offsets_.As<uint32_t>();
    call_.workspace = workspace_.As<void>();
    call_.workspace_bytes = workspace_.size();
  }

  void Run(const Backend& backend, const std::string& name) {
    Launch(backend, out_, name);
    Launch(backend, again_, name);
    Check(name);
    ExpectSameBytes(name + ": two runs", out_.As<uint8_t>(), again_.As<uint8_t>(), out_.size());
    ExpectSameBytes(name + ": past the end of the result", out_.guard(), nullptr, kGuardBytes);
    ExpectSameBytes(name + ": past the end of the workspace", workspace_.guard(), nullptr,
                    kGuardBytes);
  }

  void ExpectError(const Backend& backend, cudaError_t error, const std::string& name) {
    call_.out = out_.As<void>();
    CHECK_EQ(name + ": " + cudaGetErrorString(backend.launch(call_, nullptr)),
             name + ": " + cudaGetErrorString(error));
    ExpectSuccess(name, cudaDeviceSynchronize());
    ExpectSameBytes(name + ": the result", out_.As<uint8_t>(), nullptr, out_.size());
  }

  // After Run: the other backend gives the same bits.
  void ExpectSameBits(const Backend& other, const std::string& name) {
    Launch(other, again_, name);
    ExpectSameBytes(name + ": bits of " + other.name, out_.As<uint8_t>(), again_.As<uint8_t>(),
                    out_.size());
  }

 private:
  void Launch(const Backend& backend, const Buffer& out, const std::string& name) {
    call_.out = out.As<void>();
    ExpectSuccess(name, cudaMemset(call_.out, kCanary, out.size()));
    if (call_.accumulates) {
      FillAccumulator<<<kTestBlocks, kTestThreads>>>(call_, call_.out_elements());
    }
    ExpectSuccess(name, backend.launch(call_, nullptr));
    ExpectSuccess(name, cudaDeviceSynchronize());
  }

  static MatmulCall MakeCall(const Shape& shape, const Variant& variant) {
    MatmulCall call{};
    call.form = variant.form, call.element = variant.element;
    call.out_type = variant.out_type, call.zeroes_unused = variant.zeroes_unused;
    call.accumulates = variant.accumulates;
    call.n_rows = shape.n_rows, call.n_groups = shape.n_groups();
    call.k = shape.k, call.n = shape.n;
    return call;
  }

  bool is_e4m3() const { return call_.element == Element::kE4m3; }
  int64_t InputBytes() const { return ElementBits(call_.element) / 8; }
  size_t OutBytes() const { return call_.out_elements() * ElementBytes(call_.out_type); }

  int64_t RhsElements() const {
    const bool is_rows = call_.form == MatmulForm::kRows;
    return (is_rows ? call_.n_rows : call_.n_groups * call_.k) * call_.n;
  }

  // Of a dimension; none without scales.
  int64_t NumScaleBlocks(int64_t size) const {
    return is_e4m3() ? (size + kMatmulScaleBlock - 1) / kMatmulScaleBlock : 0;
  }

  // Rows that are not in use are NaN.
  void Fill(const Shape& shape, uint32_t seed) {
    const int64_t n_used = shape.n_used();
    const int64_t used_rhs = call_.form == MatmulForm::kRows ? n_used * call_.n : RhsElements();
    FillElements<<<kTestBlocks, kTestThreads>>>(lhs_.As<void>(), call_.element,
                                                call_.n_rows * call_.k, n_used * call_.k, seed);
    FillElements<<<kTestBlocks, kTestThreads>>>(rhs_.As<void>(), call_.element, RhsElements(),
                                                used_rhs, seed + 1);
    ExpectSuccess("cudaMemcpy", cudaMemcpy(row_offsets_.As<void>(), shape.row_offsets.data(),
                                           row_offsets_.size(), cudaMemcpyHostToDevice));
    if (!is_e4m3()) return;
    const auto fill = [&](const Buffer& scales, int64_t n_columns, int64_t n_used, uint32_t seed) {
      const auto size = static_cast<int64_t>(scales.size() / sizeof(float));
      FillScales<<<kTestBlocks, kTestThreads>>>(scales.As<float>(), size, n_columns, n_used, seed);
      return scales.As<float>();
    };
    call_.lhs_scales = fill(lhs_scales_, call_.n_rows, n_used, seed + 2);
    call_.rhs_scales = fill(rhs_scales_, 1, 1, seed + 3);
  }

  void Check(const std::string& name) {
    call_.out = out_.As<void>();
    Finding finding{};
    auto* const device_finding = finding_.As<Finding>();
    ExpectSuccess(name, cudaMemset(device_finding, 0, sizeof(finding)));
    CheckElements<<<kTestBlocks, kTestThreads>>>(call_, call_.out_elements(), device_finding);
    ExpectSuccess(name, cudaMemcpy(&finding, device_finding, sizeof(finding), cudaMemcpyDefault));
    if (finding.n_wrong == 0) return;
    std::cerr << name << ": " << finding.n_wrong << " of " << call_.out_elements()
              << " elements are wrong; row " << finding.index / call_.n << ", column "
              << finding.index % call_.n << " is " << finding.got << " (bits " << std::hex
              << finding.bits << std::dec << "), expected " << finding.low << " to " << finding.high
              << std::endl;
    CHECK_EQ(finding.n_wrong, 0u);
  }

  MatmulCall call_;
  const Buffer lhs_, rhs_, row_offsets_, lhs_scales_, rhs_scales_, out_, again_, workspace_,
      finding_;
};

}  // namespace jax_ep::matmul
