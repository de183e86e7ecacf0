// The matrix instructions of Hopper with float32 sums: for bfloat16, 64 columns of weights times
// any multiple of 8 rows up to 256; for e4m3, 64 rows times 128 columns of weights. Needs sm_90a.
#pragma once

#include <cstdint>

#include "p2p/device/ptx.cuh"

namespace jax_ep::matmul {

// An operand in shared memory, in lines of 128 bytes, swizzled in blocks of eight lines that are
// aligned to 1024 bytes and follow each other. Stored along columns, a line has 64 columns of one
// term, and blocks follow along the terms; stored along terms, a line has 64 terms of one row, or
// of one column of weights, and blocks follow along the rows or columns. Lines may also be of 64
// bytes, along columns: the other 32 columns are then kOtherBytes further.
template <uint32_t kLineBytes = 128, uint32_t kOtherBytes = 16>  // of whole lines, it is not used
class WgmmaOperand {
 public:
  __device__ explicit WgmmaOperand(uint32_t shared_address)
      : low_(kOtherBytes >> 4 << 16 | (shared_address & 0x3ffff) >> 4) {}

  // That many bytes further.
  __device__ WgmmaOperand operator+(uint32_t n_bytes) const {
    WgmmaOperand moved = *this;
    moved.low_ += n_bytes >> 4;
    return moved;
  }

  __device__ uint64_t bits() const { return kHigh | low_; }

 private:
  static_assert(kLineBytes == 128 || kLineBytes == 64);
  static constexpr uint64_t kBlockStride = 8 * kLineBytes >> 4;
  static constexpr uint64_t kSwizzle = kLineBytes == 128 ? 1 : 2;
  static constexpr uint64_t kHigh = kSwizzle << 62 | kBlockStride << 32;

  uint32_t low_;
};

// Orders accesses to registers and to shared memory before the next instructions.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until all but the last `kPending` groups are complete.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Of each half.
__device__ __forceinline__ uint32_t add_rn_bf16x2(uint32_t a, uint32_t b) {
  uint32_t sums;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sums) : "r"(a), "r"(b));
  return sums;
}

// Keeps the compiler from reading sums before a wait that precedes this.
template <int kSize>
__device__ __forceinline__ void FenceSums(float* sums) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// Issue() adds the products of [64, 16], stored along columns or along terms, and [16, kN], stored
// along terms, to kN / 2 sums. Thread t of the warp group has, of column 16 (t / 32) + t % 32 / 4,
// rows 8 i + 2 (t % 4) and the next in sums[4 i] and the next, and of the column eight further in
// the two after these.
template <int kN>
struct Wgmma;

// Sums i and i + 1, of one column, rounded; i is even.
struct RoundedPairs {
  __device__ __forceinline__ uint32_t operator()(const float* sums, int i) const {
    return p2p::cvt_rn_bf16x2_f32(sums[i + 1], sums[i]);
  }
};

// The same, plus numbers in bfloat16: the sum of the two is rounded once more.
struct BiasedPairs {
  uint32_t biases[2];  // of the thread's two columns

  __device__ __forceinline__ uint32_t operator()(const float* sums, int i) const {
    return add_rn_bf16x2(RoundedPairs{}(sums, i), 0x10001u * biases[i / 2 % 2]);
  }
};

#define JAX_EP_WGMMA_ISSUE(n, registers, a, b, is_along_columns, ...)                       \
  asm volatile(                                                                             \
      "{\n\t.reg .pred p;\n\tsetp.eq.u32 p, 0, 0;\n\t"                                      \
      "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" registers "}, " a ", " b \
      ", p, 1, 1, " #is_along_columns ", 0;\n\t}"                                           \
      : __VA_ARGS__                                                                         \
      : "l"(weights.bits()), "l"(rows.bits()))
#define JAX_EP_WGMMA(n, registers, a, b, ...)                                         \
  template <>                                                                         \
  struct Wgmma<n> {                                                                   \
    template <bool kAlongColumns, class Weights>                                      \
    static __device__ __forceinline__ void Issue(float* sums, const Weights& weights, \
                                                 const WgmmaOperand<>& rows) {        \
      if constexpr (kAlongColumns) {                                                  \
        JAX_EP_WGMMA_ISSUE(n, registers, a, b, 1, __VA_ARGS__);                       \
      } else {                                                                        \
        JAX_EP_WGMMA_ISSUE(n, registers, a, b, 0, __VA_ARGS__);                       \
      }                                                                               \
    }                                                                                 \
  }
#define JAX_EP_SUMS(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define JAX_EP_R8 "%0, %1, %2, %3"
#define JAX_EP_S8 JAX_EP_SUMS(0)
#define JAX_EP_R16 JAX_EP_R8 ", %4, %5, %6, %7"
#define JAX_EP_S16 JAX_EP_S8, JAX_EP_SUMS(4)
#define JAX_EP_R24 JAX_EP_R16 ", %8, %9, %10, %11"
#define JAX_EP_S24 JAX_EP_S16, JAX_EP_SUMS(8)
#define JAX_EP_R32 JAX_EP_R24 ", %12, %13, %14, %15"
#define JAX_EP_S32 JAX_EP_S24, JAX_EP_SUMS(12)
#define JAX_EP_R40 JAX_EP_R32 ", %16, %17, %18, %19"
#define JAX_EP_S40 JAX_EP_S32, JAX_EP_SUMS(16)
#define JAX_EP_R48 JAX_EP_R40 ", %20, %21, %22, %23"
#define JAX_EP_S48 JAX_EP_S40, JAX_EP_SUMS(20)
#define JAX_EP_R56 JAX_EP_R48 ", %24, %25, %26, %27"
#define JAX_EP_S56 JAX_EP_S48, JAX_EP_SUMS(24)
#define JAX_EP_R64 JAX_EP_R56 ", %28, %29, %30, %31"
#define JAX_EP_S64 JAX_EP_S56, JAX_EP_SUMS(28)
#define JAX_EP_R72 JAX_EP_R64 ", %32, %33, %34, %35"
#define JAX_EP_S72 JAX_EP_S64, JAX_EP_SUMS(32)
#define JAX_EP_R80 JAX_EP_R72 ", %36, %37, %38, %39"
#define JAX_EP_S80 JAX_EP_S72, JAX_EP_SUMS(36)
#define JAX_EP_R88 JAX_EP_R80 ", %40, %41, %42, %43"
#define JAX_EP_S88 JAX_EP_S80, JAX_EP_SUMS(40)
#define JAX_EP_R96 JAX_EP_R88 ", %44, %45, %46, %47"
#define JAX_EP_S96 JAX_EP_S88, JAX_EP_SUMS(44)
#define JAX_EP_R104 JAX_EP_R96 ", %48, %49, %50, %51"
#define JAX_EP_S104 JAX_EP_S96, JAX_EP_SUMS(48)
#define JAX_EP_R112 JAX_EP_R104 ", %52, %53, %54, %55"
#define JAX_EP_S112 JAX_EP_S104, JAX_EP_SUMS(52)
#define JAX_EP_R120 JAX_EP_R112 ", %56, %57, %58, %59"
#define JAX_EP_S120 JAX_EP_S112, JAX_EP_SUMS(56)
#define JAX_EP_R128 JAX_EP_R120 ", %60, %61, %62, %63"
#define JAX_EP_S128 JAX_EP_S120, JAX_EP_SUMS(60)
#define JAX_EP_R136 JAX_EP_R128 ", %64, %65, %66, %67"
#define JAX_EP_S136 JAX_EP_S128, JAX_EP_SUMS(64)
#define JAX_EP_R144 JAX_EP_R136 ", %68, %69, %70, %71"
#define JAX_EP_S144 JAX_EP_S136, JAX_EP_SUMS(68)
#define JAX_EP_R152 JAX_EP_R144 ", %72, %73, %74, %75"
#define JAX_EP_S152 JAX_EP_S144, JAX_EP_SUMS(72)
#define JAX_EP_R160 JAX_EP_R152 ", %76, %77, %78, %79"
#define JAX_EP_S160 JAX_EP_S152, JAX_EP_SUMS(76)
#define JAX_EP_R168 JAX_EP_R160 ", %80, %81, %82, %83"
#define JAX_EP_S168 JAX_EP_S160, JAX_EP_SUMS(80)
#define JAX_EP_R176 JAX_EP_R168 ", %84, %85, %86, %87"
#define JAX_EP_S176 JAX_EP_S168, JAX_EP_SUMS(84)
#define JAX_EP_R184 JAX_EP_R176 ", %88, %89, %90, %91"
#define JAX_EP_S184 JAX_EP_S176, JAX_EP_SUMS(88)
#define JAX_EP_R192 JAX_EP_R184 ", %92, %93, %94, %95"
#define JAX_EP_S192 JAX_EP_S184, JAX_EP_SUMS(92)
#define JAX_EP_R200 JAX_EP_R192 ", %96, %97, %98, %99"
#define JAX_EP_S200 JAX_EP_S192, JAX_EP_SUMS(96)
#define JAX_EP_R208 JAX_EP_R200 ", %100, %101, %102, %103"
#define JAX_EP_S208 JAX_EP_S200, JAX_EP_SUMS(100)
#define JAX_EP_R216 JAX_EP_R208 ", %104, %105, %106, %107"
#define JAX_EP_S216 JAX_EP_S208, JAX_EP_SUMS(104)
#define JAX_EP_R224 JAX_EP_R216 ", %108, %109, %110, %111"
#define JAX_EP_S224 JAX_EP_S216, JAX_EP_SUMS(108)
#define JAX_EP_R232 JAX_EP_R224 ", %112, %113, %114, %115"
#define JAX_EP_S232 JAX_EP_S224, JAX_EP_SUMS(112)
#define JAX_EP_R240 JAX_EP_R232 ", %116, %117, %118, %119"
#define JAX_EP_S240 JAX_EP_S232, JAX_EP_SUMS(116)
#define JAX_EP_R248 JAX_EP_R240 ", %120, %121, %122, %123"
#define JAX_EP_S248 JAX_EP_S240, JAX_EP_SUMS(120)
#define JAX_EP_R256 JAX_EP_R248 ", %124, %125, %126, %127"
#define JAX_EP_S256 JAX_EP_S248, JAX_EP_SUMS(124)
JAX_EP_WGMMA(8, JAX_EP_R8, "%4", "%5", JAX_EP_S8);
JAX_EP_WGMMA(16, JAX_EP_R16, "%8", "%9", JAX_EP_S16);
JAX_EP_WGMMA(24, JAX_EP_R24, "%12", "%13", JAX_EP_S24);
JAX_EP_WGMMA(32, JAX_EP_R32, "%16", "%17", JAX_EP_S32);
JAX_EP_WGMMA(40, JAX_EP_R40, "%20", "%21", JAX_EP_S40);
JAX_EP_WGMMA(48, JAX_EP_R48, "%24", "%25", JAX_EP_S48);
JAX_EP_WGMMA(56, JAX_EP_R56, "%28", "%29", JAX_EP_S56);
JAX_EP_WGMMA(64, JAX_EP_R64, "%32", "%33", JAX_EP_S64);
JAX_EP_WGMMA(72, JAX_EP_R72, "%36", "%37", JAX_EP_S72);
JAX_EP_WGMMA(80, JAX_EP_R80, "%40", "%41", JAX_EP_S80);
JAX_EP_WGMMA(88, JAX_EP_R88, "%44", "%45", JAX_EP_S88);
JAX_EP_WGMMA(96, JAX_EP_R96, "%48", "%49", JAX_EP_S96);
JAX_EP_WGMMA(104, JAX_EP_R104, "%52", "%53", JAX_EP_S104);
JAX_EP_WGMMA(112, JAX_EP_R112, "%56", "%57", JAX_EP_S112);
JAX_EP_WGMMA(120, JAX_EP_R120, "%60", "%61", JAX_EP_S120);
JAX_EP_WGMMA(128, JAX_EP_R128, "%64", "%65", JAX_EP_S128);
JAX_EP_WGMMA(136, JAX_EP_R136, "%68", "%69", JAX_EP_S136);
JAX_EP_WGMMA(144, JAX_EP_R144, "%72", "%73", JAX_EP_S144);
JAX_EP_WGMMA(152, JAX_EP_R152, "%76", "%77", JAX_EP_S152);
JAX_EP_WGMMA(160, JAX_EP_R160, "%80", "%81", JAX_EP_S160);
JAX_EP_WGMMA(168, JAX_EP_R168, "%84", "%85", JAX_EP_S168);
JAX_EP_WGMMA(176, JAX_EP_R176, "%88", "%89", JAX_EP_S176);
JAX_EP_WGMMA(184, JAX_EP_R184, "%92", "%93", JAX_EP_S184);
JAX_EP_WGMMA(192, JAX_EP_R192, "%96", "%97", JAX_EP_S192);
JAX_EP_WGMMA(200, JAX_EP_R200, "%100", "%101", JAX_EP_S200);
JAX_EP_WGMMA(208, JAX_EP_R208, "%104", "%105", JAX_EP_S208);
JAX_EP_WGMMA(216, JAX_EP_R216, "%108", "%109", JAX_EP_S216);
JAX_EP_WGMMA(224, JAX_EP_R224, "%112", "%113", JAX_EP_S224);
JAX_EP_WGMMA(232, JAX_EP_R232, "%116", "%117", JAX_EP_S232);
JAX_EP_WGMMA(240, JAX_EP_R240, "%120", "%121", JAX_EP_S240);
JAX_EP_WGMMA(248, JAX_EP_R248, "%124", "%125", JAX_EP_S248);
JAX_EP_WGMMA(256, JAX_EP_R256, "%128", "%129", JAX_EP_S256);

// The same for e4m3: [64, 32] and [32, 128], both stored along terms. Unless it accumulates, the
// old sums do not count.
__device__ __forceinline__ void IssueE4m3(float* sums, const WgmmaOperand<>& lhs,
                                          const WgmmaOperand<>& rhs, bool accumulates) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %66, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" JAX_EP_R128
      "}, %64, %65, p, 1, 1;\n\t}"
      : JAX_EP_S128
      : "l"(lhs.bits()), "l"(rhs.bits()), "r"(int{accumulates}));
}

// The same for a block of 128 terms, as a group of instructions, when the products before them have
// been read.
__device__ __forceinline__ void IssueE4m3Block(float* products, const WgmmaOperand<>& lhs,
                                               const WgmmaOperand<>& rhs) {
  constexpr uint32_t kBlockBytes = 128, kStepBytes = 32, kProducts = 64;
  FenceSums<kProducts>(products);
  wgmma_fence();
#pragma unroll
  for (uint32_t step = 0; step < kBlockBytes; step += kStepBytes) {
    IssueE4m3(products, lhs + step, rhs + step, step > 0);
  }
  wgmma_commit_group();
}

#undef JAX_EP_R8
#undef JAX_EP_S8
#undef JAX_EP_R16
#undef JAX_EP_S16
#undef JAX_EP_R24
#undef JAX_EP_S24
#undef JAX_EP_R32
#undef JAX_EP_S32
#undef JAX_EP_R40
#undef JAX_EP_S40
#undef JAX_EP_R48
#undef JAX_EP_S48
#undef JAX_EP_R56
#undef JAX_EP_S56
#undef JAX_EP_R64
#undef JAX_EP_S64
#undef JAX_EP_R72
#undef JAX_EP_S72
#undef JAX_EP_R80
#undef JAX_EP_S80
#undef JAX_EP_R88
#undef JAX_EP_S88
#undef JAX_EP_R96
#undef JAX_EP_S96
#undef JAX_EP_R104
#undef JAX_EP_S104
#undef JAX_EP_R112
#undef JAX_EP_S112
#undef JAX_EP_R120
#undef JAX_EP_S120
#undef JAX_EP_R128
#undef JAX_EP_S128
#undef JAX_EP_R136
#undef JAX_EP_S136
#undef JAX_EP_R144
#undef JAX_EP_S144
#undef JAX_EP_R152
#undef JAX_EP_S152
#undef JAX_EP_R160
#undef JAX_EP_S160
#undef JAX_EP_R168
#undef JAX_EP_S168
#undef JAX_EP_R176
#undef JAX_EP_S176
#undef JAX_EP_R184
#undef JAX_EP_S184
#undef JAX_EP_R192
#undef JAX_EP_S192
#undef JAX_EP_R200
#undef JAX_EP_S200
#undef JAX_EP_R208
#undef JAX_EP_S208
#undef JAX_EP_R216
#undef JAX_EP_S216
#undef JAX_EP_R224
#undef JAX_EP_S224
#undef JAX_EP_R232
#undef JAX_EP_S232
#undef JAX_EP_R240
#undef JAX_EP_S240
#undef JAX_EP_R248
#undef JAX_EP_S248
#undef JAX_EP_R256
#undef JAX_EP_S256
#undef JAX_EP_SUMS
#undef JAX_EP_WGMMA
#undef JAX_EP_WGMMA_ISSUE

}  // namespace jax_ep::matmul
