#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "quern/core/isa.h"
#include "quern/core/kernel_set.h"
#include "quern/core/limits/limits_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/limits/peak_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "quern/core/quad_dot-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Makes the compiler forget what v holds, and keeps it in its register. Without
// this a product of constants would leave the loop, and g++ 12 copies a sum to
// another register or to the stack in each step.
template <class V>
HWY_INLINE void Forget(V& v) {
#if HWY_ARCH_X86 && HWY_COMPILER_GCC && \
    !(HWY_TARGET & (HWY_EMU128 | HWY_SCALAR))
  asm volatile("" : "+v"(v.raw));
#else
  (void)v;
#endif
}

constexpr bool kHasFma = HWY_NATIVE_FMA != 0;

// A fused multiply-add has a latency of 4 or 5 cycles and two units: ten sums
// hide it. Twelve and both operands fit into sixteen registers.
struct PeakF32 {
  static constexpr int kSums = 12;
  static constexpr double kProductsPerLane = 1;
  static constexpr const char* kSequence = kHasFma ? "fma" : "mul, add";
  using D = hn::ScalableTag<float>;
  using Sum = hn::VFromD<D>;
  struct Operands {
    Sum a, b;
  };
  static HWY_INLINE Operands Set(int a, int b) {
    return {hn::Set(D(), static_cast<float>(a)),
            hn::Set(D(), static_cast<float>(b))};
  }
  static HWY_INLINE void Add(Operands& x, Sum& sum) {
    Forget(x.a);
    sum = hn::MulAdd(x.a, x.b, sum);
    Forget(sum);
  }
};

#if HWY_NATIVE_DOT_BF16
// The instruction has a latency of up to 11 cycles and one unit.
struct PeakBF16 {
  static constexpr int kSums = 12;
  static constexpr double kProductsPerLane = 2;
  static constexpr const char* kSequence = "bf16 dot";
  using D = hn::ScalableTag<float>;
  using Sum = hn::VFromD<D>;
  using DB = hn::Repartition<hwy::bfloat16_t, D>;
  struct Operands {
    hn::VFromD<DB> a, b;
  };
  static HWY_INLINE Operands Set(int a, int b) {
    return {hn::Set(DB(), hwy::BF16FromF32(static_cast<float>(a))),
            hn::Set(DB(), hwy::BF16FromF32(static_cast<float>(b)))};
  }
  static HWY_INLINE void Add(Operands& x, Sum& sum) {
    Forget(x.a);
    Sum unused = hn::Zero(D());  // of the instruction sets without it
    sum = hn::ReorderWidenMulAccumulate(D(), x.a, x.b, sum, unused);
    Forget(sum);
  }
};
#else
using PeakBF16 = PeakF32;
#endif

using DI32 = hn::ScalableTag<int32_t>;
using VI32 = hn::VFromD<DI32>;
using DI16 = hn::Repartition<int16_t, DI32>;
using DU8 = hn::Repartition<uint8_t, DI32>;
using DI8 = hn::Repartition<int8_t, DI32>;

// Sums of products that are made by one instruction and added by another. Two
// products are added to each other first: 64 operations a cycle instead of 58,
// because fewer additions wait for their sums (Zen 3, AVX2, 2026).
template <class Product>
struct PeakOfProducts {
  static constexpr int kSums = 8;  // an addition takes one cycle
  static constexpr double kProductsPerLane = 2 * Product::kPerLane;
  static constexpr const char* kSequence = Product::kSequence;
  using D = DI32;
  using Sum = VI32;
  using Operands = typename Product::Operands;
  static HWY_INLINE Operands Set(int a, int b) { return Product::Set(a, b); }
  static HWY_INLINE void Add(Operands& x, Sum& sum) {
    Forget(x.a);
    Sum first = Product::Multiply(x);
    Forget(x.a);
    Sum second = Product::Multiply(x);
    Forget(first);
    Forget(second);
    sum = hn::Add(sum, hn::Add(first, second));
    Forget(sum);
  }
};

#if !QUERN_AVX_VNNI_PASS && !QUERN_AVX_VNNI_INT8_PASS && \
    (HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2 || \
     HWY_TARGET == HWY_SSE4 || HWY_TARGET == HWY_SSSE3)

// a[2i] * b[2i] + a[2i + 1] * b[2i + 1], saturated to 16 bits.
#if HWY_TARGET == HWY_AVX3
HWY_INLINE __m512i MulPairs(__m512i a, __m512i b) {
  return _mm512_maddubs_epi16(a, b);
}
#elif HWY_TARGET == HWY_AVX2
HWY_INLINE __m256i MulPairs(__m256i a, __m256i b) {
  return _mm256_maddubs_epi16(a, b);
}
#else
HWY_INLINE __m128i MulPairs(__m128i a, __m128i b) {
  return _mm_maddubs_epi16(a, b);
}
#endif

// Two multiplies make four products a lane. Highway's exact product of u8 and
// s8 needs as many multiplies, and shifts and masks besides: 42 operations a
// cycle instead of 64 (Zen 3, AVX2, 2026).
struct ProductI8 {
  static constexpr double kPerLane = 4;
  static constexpr const char* kSequence = "maddubs, madd, add";
  struct Operands {
    hn::VFromD<DU8> a;
    hn::VFromD<DI8> b;
    hn::VFromD<DI16> one;
  };
  static HWY_INLINE Operands Set(int a, int b) {
    return {hn::Set(DU8(), static_cast<uint8_t>(a)),
            hn::Set(DI8(), static_cast<int8_t>(b)), hn::Set(DI16(), 1)};
  }
  static HWY_INLINE VI32 Multiply(const Operands& x) {
    const hn::VFromD<DI16> pairs{MulPairs(x.a.raw, x.b.raw)};
    return hn::WidenMulPairwiseAdd(DI32(), pairs, x.one);
  }
};
using PeakI8 = PeakOfProducts<ProductI8>;

// Products of eight quads are added in 16 bits before they are widened: 9
// multiplications and 8 additions, where PeakI8 takes 16 and 8.
struct ProductI6 {
  static constexpr int kQuads = 8;
  static constexpr double kPerLane = 4 * kQuads;
  static constexpr const char* kSequence = "8 maddubs, 7 add, madd, add";
  using Operands = ProductI8::Operands;
  static HWY_INLINE Operands Set(int a, int b) { return ProductI8::Set(a, b); }
  static HWY_INLINE VI32 Multiply(Operands& x) {
    hn::VFromD<DI16> sum{MulPairs(x.a.raw, x.b.raw)};
    HWY_UNROLL(8)
    for (int i = 1; i < kQuads; ++i) {
      Forget(x.a);
      Forget(sum);
      sum = hn::Add(sum, hn::VFromD<DI16>{MulPairs(x.a.raw, x.b.raw)});
    }
    return hn::WidenMulPairwiseAdd(DI32(), sum, x.one);
  }
};
using PeakI6 = PeakOfProducts<ProductI6>;

#elif HWY_TARGET == HWY_SSE2

// There is no multiply of bytes: they are widened before the loop.
struct ProductI8 {
  static constexpr double kPerLane = 2;
  static constexpr const char* kSequence = "madd, add";
  struct Operands {
    hn::VFromD<DI16> a, b;
  };
  static HWY_INLINE Operands Set(int a, int b) {
    return {hn::Set(DI16(), static_cast<int16_t>(a)),
            hn::Set(DI16(), static_cast<int16_t>(b))};
  }
  static HWY_INLINE VI32 Multiply(const Operands& x) {
    return hn::WidenMulPairwiseAdd(DI32(), x.a, x.b);
  }
};
using PeakI8 = PeakOfProducts<ProductI8>;
using PeakI6 = PeakI8;

#else

// An instruction multiplies and adds, with a latency of up to five cycles.
struct PeakI8 {
  static constexpr int kSums = 12;
  static constexpr double kProductsPerLane = 4;
  static constexpr const char* kSequence =
      QUERN_AVX_VNNI_INT8_PASS ? "s8 s8 dot" : "u8 s8 dot";
  using D = DI32;
  using Sum = VI32;
  struct Operands {
    hn::VFromD<DU8> a;
    hn::VFromD<DI8> b;
  };
  static HWY_INLINE Operands Set(int a, int b) {
    return {hn::Set(DU8(), static_cast<uint8_t>(a)),
            hn::Set(DI8(), static_cast<int8_t>(b))};
  }
  static HWY_INLINE void Add(Operands& x, Sum& sum) {
    Forget(x.a);
#if QUERN_AVX_VNNI_INT8_PASS
    sum = DotSignedQuads(DI32(), hn::BitCast(DI8(), x.a), x.b, sum);
#else
    sum = DotQuads(DI32(), x.a, x.b, sum);
#endif
    Forget(sum);
  }
};
using PeakI6 = PeakI8;

#endif

// Sums have names because vectors of unknown size cannot be in arrays.
template <class Peak>
double Run(size_t steps, int a, int b) {
  typename Peak::Operands x = Peak::Set(a, b);
  Forget(x.a);
  Forget(x.b);
  const typename Peak::D d;
  using Sum = typename Peak::Sum;
  Sum s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0;
  Sum s7 = s0, s8 = s0, s9 = s0, s10 = s0, s11 = s0;
  for (size_t step = 0; step < steps; ++step) {
    Peak::Add(x, s0);
    Peak::Add(x, s1);
    Peak::Add(x, s2);
    Peak::Add(x, s3);
    Peak::Add(x, s4);
    Peak::Add(x, s5);
    Peak::Add(x, s6);
    Peak::Add(x, s7);
    if constexpr (Peak::kSums == 12) {
      Peak::Add(x, s8);
      Peak::Add(x, s9);
      Peak::Add(x, s10);
      Peak::Add(x, s11);
    }
  }
  const auto total = [d](Sum sum) HWY_ATTR {
    return static_cast<double>(hn::ReduceSum(d, sum));
  };
  return total(s0) + total(s1) + total(s2) + total(s3) + total(s4) + total(s5) +
         total(s6) + total(s7) + total(s8) + total(s9) + total(s10) +
         total(s11);
}

template <class Peak>
PeakKernel MakePeak() {
  const auto lanes = static_cast<double>(hn::Lanes(typename Peak::D()));
  return {&Run<Peak>, Peak::kSums, 2 * lanes * Peak::kProductsPerLane,
          Peak::kSequence};
}

PeakKernels GetKernels() {
  return {KernelTarget(), MakePeak<PeakF32>(), MakePeak<PeakBF16>(),
          MakePeak<PeakI8>(), MakePeak<PeakI6>()};
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern {
#if QUERN_AVX_VNNI_INT8_PASS
PeakKernels GetPeakAvxVnniInt8Kernels() {
  return HWY_STATIC_DISPATCH(GetKernels)();
}
#elif QUERN_AVX_VNNI_PASS
PeakKernels GetPeakAvxVnniKernels() {
  return HWY_STATIC_DISPATCH(GetKernels)();
}
#else
absl::Span<const PeakKernelSet> PeakKernelSets() {
  static constexpr PeakKernelSet kSets[] = {
    QUERN_HWY_SETS_ABOVE_AVX2(GetKernels),
#if QUERN_AVX_VNNI
    {kAvx2VnniInt8, &GetPeakAvxVnniInt8Kernels},
    {kAvx2Vnni, &GetPeakAvxVnniKernels},
#endif
    QUERN_HWY_SETS_FROM_AVX2(GetKernels),
  };
  return kSets;
}
PeakKernels GetPeakKernels() { return FirstThatRuns(PeakKernelSets()).get(); }
#endif
}  // namespace quern
#endif  // HWY_ONCE
