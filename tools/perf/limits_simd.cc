#include <cstddef>
#include <cstdint>

#include "tools/perf/limits_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tools/perf/limits_simd.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using DU64 = hn::ScalableTag<uint64_t>;
using VU64 = hn::VFromD<DU64>;

// One block ahead, line by line: what the loop is about to need.
HWY_INLINE void PrefetchBlock(const uint8_t* p) {
  for (size_t line = 0; line < kLimitBlockBytes; line += 64) {
    hwy::Prefetch(p + line);
  }
}

template <bool kPrefetch>
uint64_t ReadLoop(const uint8_t* HWY_RESTRICT data, size_t bytes,
                  size_t prefetch_bytes) {
  const DU64 d;
  const size_t n = hn::Lanes(d);
  VU64 x0 = hn::Zero(d), x1 = x0, x2 = x0, x3 = x0;
  VU64 x4 = x0, x5 = x0, x6 = x0, x7 = x0;
  for (size_t i = 0; i < bytes; i += kLimitBlockBytes) {
    if constexpr (kPrefetch) PrefetchBlock(data + i + prefetch_bytes);
    const auto* p = reinterpret_cast<const uint64_t*>(data + i);
    const auto* end = p + kLimitBlockBytes / sizeof(uint64_t);
    for (; p < end; p += 8 * n) {  // once for the widest vectors
      x0 = hn::Xor(x0, hn::Load(d, p));
      x1 = hn::Xor(x1, hn::Load(d, p + n));
      x2 = hn::Xor(x2, hn::Load(d, p + 2 * n));
      x3 = hn::Xor(x3, hn::Load(d, p + 3 * n));
      x4 = hn::Xor(x4, hn::Load(d, p + 4 * n));
      x5 = hn::Xor(x5, hn::Load(d, p + 5 * n));
      x6 = hn::Xor(x6, hn::Load(d, p + 6 * n));
      x7 = hn::Xor(x7, hn::Load(d, p + 7 * n));
    }
  }
  x0 = hn::Xor(hn::Xor(x0, x1), hn::Xor(x2, x3));
  x4 = hn::Xor(hn::Xor(x4, x5), hn::Xor(x6, x7));
  return hn::ReduceSum(d, hn::Xor(x0, x4));
}

uint64_t Read(const uint8_t* data, size_t bytes, size_t prefetch_bytes) {
  return prefetch_bytes == 0 ? ReadLoop<false>(data, bytes, 0)
                             : ReadLoop<true>(data, bytes, prefetch_bytes);
}

void Write(uint8_t* HWY_RESTRICT data, size_t bytes) {
  const DU64 d;
  const size_t n = hn::Lanes(d);
  const VU64 value = hn::Set(d, 0x0101010101010101u);
  auto* p = reinterpret_cast<uint64_t*>(data);
  auto* end = p + bytes / sizeof(uint64_t);
  for (; p < end; p += 8 * n) {
    hn::Stream(value, d, p);
    hn::Stream(value, d, p + n);
    hn::Stream(value, d, p + 2 * n);
    hn::Stream(value, d, p + 3 * n);
    hn::Stream(value, d, p + 4 * n);
    hn::Stream(value, d, p + 5 * n);
    hn::Stream(value, d, p + 6 * n);
    hn::Stream(value, d, p + 7 * n);
  }
  hwy::FlushStream();
}

template <bool kPrefetch>
void CopyLoop(const uint8_t* HWY_RESTRICT from, uint8_t* HWY_RESTRICT to,
              size_t bytes, size_t prefetch_bytes) {
  const DU64 d;
  const size_t n = hn::Lanes(d);
  for (size_t i = 0; i < bytes; i += kLimitBlockBytes) {
    if constexpr (kPrefetch) PrefetchBlock(from + i + prefetch_bytes);
    const auto* p = reinterpret_cast<const uint64_t*>(from + i);
    const auto* end = p + kLimitBlockBytes / sizeof(uint64_t);
    auto* q = reinterpret_cast<uint64_t*>(to + i);
    for (; p < end; p += 8 * n, q += 8 * n) {
      const VU64 x0 = hn::Load(d, p);
      const VU64 x1 = hn::Load(d, p + n);
      const VU64 x2 = hn::Load(d, p + 2 * n);
      const VU64 x3 = hn::Load(d, p + 3 * n);
      const VU64 x4 = hn::Load(d, p + 4 * n);
      const VU64 x5 = hn::Load(d, p + 5 * n);
      const VU64 x6 = hn::Load(d, p + 6 * n);
      const VU64 x7 = hn::Load(d, p + 7 * n);
      hn::Stream(x0, d, q);
      hn::Stream(x1, d, q + n);
      hn::Stream(x2, d, q + 2 * n);
      hn::Stream(x3, d, q + 3 * n);
      hn::Stream(x4, d, q + 4 * n);
      hn::Stream(x5, d, q + 5 * n);
      hn::Stream(x6, d, q + 6 * n);
      hn::Stream(x7, d, q + 7 * n);
    }
  }
  hwy::FlushStream();
}

void Copy(const uint8_t* from, uint8_t* to, size_t bytes,
          size_t prefetch_bytes) {
  if (prefetch_bytes == 0) {
    CopyLoop<false>(from, to, bytes, 0);
  } else {
    CopyLoop<true>(from, to, bytes, prefetch_bytes);
  }
}

// v, in a register: without this g++ 12 folds one load into two dot products,
// and the loop would measure the load ports of a Zen 4 (2026).
template <class V>
HWY_INLINE V InRegister(V v) {
#if HWY_ARCH_X86 && HWY_COMPILER_GCC && \
    !(HWY_TARGET & (HWY_EMU128 | HWY_SCALAR))
  asm("" : "+v"(v.raw));
#endif
  return v;
}

// 32 vector registers or 16: how large a tile stays in registers.
#if HWY_TARGET <= HWY_AVX3
constexpr bool kManyRegisters = true;
#else
constexpr bool kManyRegisters = false;
#endif

struct DotF32 {
  // Two FMA of latency 4 per cycle need eight sums in flight.
  static constexpr int kCols = kManyRegisters ? 6 : 5;
  static constexpr double kOpsPerLane = 2;
  using A = float;
  using B = float;
  using D = hn::ScalableTag<float>;
  struct Sum {
    hn::VFromD<D> sum;
  };
  static HWY_INLINE Sum Zero() { return {hn::Zero(D())}; }
  static HWY_INLINE void Add(hn::VFromD<D> a, hn::VFromD<D> b, Sum& c) {
    c.sum = hn::MulAdd(a, b, c.sum);
  }
  static HWY_INLINE double Total(const Sum& c) {
    return hn::ReduceSum(D(), c.sum);
  }
};

struct DotBF16 {
  // Without the instruction, a product is two FMAs into two sums.
  static constexpr int kCols =
      HWY_NATIVE_DOT_BF16 != 0 ? 6 : (kManyRegisters ? 4 : 2);
  static constexpr double kOpsPerLane = 4;
  using A = hwy::bfloat16_t;
  using B = hwy::bfloat16_t;
  using D = hn::ScalableTag<float>;
  using V = hn::VFromD<hn::Repartition<hwy::bfloat16_t, D>>;
  struct Sum {
    hn::VFromD<D> sum, sum1;
  };
  static HWY_INLINE Sum Zero() { return {hn::Zero(D()), hn::Zero(D())}; }
  static HWY_INLINE void Add(V a, V b, Sum& c) {
    c.sum = hn::ReorderWidenMulAccumulate(D(), a, b, c.sum, c.sum1);
  }
  static HWY_INLINE double Total(const Sum& c) {
    return hn::ReduceSum(D(), hn::Add(c.sum, c.sum1));
  }
};

struct DotI8 {
  static constexpr int kCols = kManyRegisters ? 6 : 4;
  static constexpr double kOpsPerLane = 8;
  using A = uint8_t;
  using B = int8_t;
  using D = hn::ScalableTag<int32_t>;
  using VA = hn::VFromD<hn::Repartition<uint8_t, D>>;
  using VB = hn::VFromD<hn::Repartition<int8_t, D>>;
  struct Sum {
    hn::VFromD<D> sum;
  };
  static HWY_INLINE Sum Zero() { return {hn::Zero(D())}; }
  static HWY_INLINE void Add(VA a, VB b, Sum& c) {
    c.sum = InRegister(hn::SumOfMulQuadAccumulate(D(), a, b, c.sum));
  }
  static HWY_INLINE double Total(const Sum& c) {
    return hn::ReduceSum(D(), c.sum);
  }
};

// A tile of 2 x kCols sums. Distinct operands from memory for each: equal or
// constant ones would let the compiler share products, or move the widening of
// bf16 out of the loop where an instruction set has no dot product.
template <class Dot>
double DotLoop(size_t steps, const uint8_t* HWY_RESTRICT operands) {
  const hn::Repartition<typename Dot::A, typename Dot::D> da;
  const hn::Repartition<typename Dot::B, typename Dot::D> db;
  constexpr int kCols = Dot::kCols;
  constexpr size_t kVectors = 8;
  const size_t vector_bytes = hn::Lanes(da) * sizeof(typename Dot::A);
  using Sum = typename Dot::Sum;
  Sum c00 = Dot::Zero(), c01 = c00, c02 = c00, c03 = c00, c04 = c00, c05 = c00;
  Sum c10 = c00, c11 = c00, c12 = c00, c13 = c00, c14 = c00, c15 = c00;
  size_t offset = 0;
  for (size_t step = 0; step < steps; ++step) {
    const uint8_t* p = operands + offset;
    offset = (offset + kVectors * vector_bytes) % kOperandBytes;
    const auto a0 =
        InRegister(hn::Load(da, reinterpret_cast<const typename Dot::A*>(p)));
    const auto a1 = InRegister(hn::Load(
        da, reinterpret_cast<const typename Dot::A*>(p + vector_bytes)));
    const auto b = [&](size_t i) HWY_ATTR {
      return InRegister(hn::Load(db, reinterpret_cast<const typename Dot::B*>(
                                         p + (2 + i) * vector_bytes)));
    };
    const auto b0 = b(0);
    Dot::Add(a0, b0, c00);
    Dot::Add(a1, b0, c10);
    const auto b1 = b(1);
    Dot::Add(a0, b1, c01);
    Dot::Add(a1, b1, c11);
    if constexpr (kCols > 2) {
      const auto b2 = b(2);
      Dot::Add(a0, b2, c02);
      Dot::Add(a1, b2, c12);
      const auto b3 = b(3);
      Dot::Add(a0, b3, c03);
      Dot::Add(a1, b3, c13);
    }
    if constexpr (kCols > 4) {
      const auto b4 = b(4);
      Dot::Add(a0, b4, c04);
      Dot::Add(a1, b4, c14);
    }
    if constexpr (kCols > 5) {
      const auto b5 = b(5);
      Dot::Add(a0, b5, c05);
      Dot::Add(a1, b5, c15);
    }
  }
  return Dot::Total(c00) + Dot::Total(c01) + Dot::Total(c02) + Dot::Total(c03) +
         Dot::Total(c04) + Dot::Total(c05) + Dot::Total(c10) + Dot::Total(c11) +
         Dot::Total(c12) + Dot::Total(c13) + Dot::Total(c14) + Dot::Total(c15);
}

template <class Dot>
DotKernel MakeDot() {
  const double lanes = static_cast<double>(hn::Lanes(typename Dot::D()));
  return {&DotLoop<Dot>, 2 * Dot::kCols * lanes * Dot::kOpsPerLane};
}

LimitKernels GetKernels() {
  LimitKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.read = &Read;
  kernels.write = &Write;
  kernels.copy = &Copy;
  kernels.f32 = MakeDot<DotF32>();
  kernels.bf16 = MakeDot<DotBF16>();
  kernels.i8 = MakeDot<DotI8>();
  return kernels;
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern {
namespace {
HWY_EXPORT(GetKernels);
}  // namespace
LimitKernels GetLimitKernels() { return HWY_DYNAMIC_DISPATCH(GetKernels)(); }
}  // namespace quern
#endif  // HWY_ONCE
