// Sums of products that stay in registers, for gemm and attention:
//
//   sums[r][v] += dot(words[r], line[v]),   r < kRows, v < kVecs
//
// A line is 16 words, each of which meets one word of a row: vectors of a line
// are sums side by side. A Dot says what a word means:
//
//   using D                       tag of the lanes of the sums
//   static size_t kSub            32-bit words of a row that one line meets: 2
//                                 where a pair's halves are multiplied one
//                                 after the other
//   static size_t kWordElements   elements in a word of a line; attention alone
//                                 reads it, so gemm's own Dots leave it out
//   static Operand LoadB<i>(line)        a vector of the line, or of its half i
//   static Operand LoadNB<i>(line, n)    its first n words, and zeros
//   static Vec MulAdd(operand, word, sum)

// clang-format off
#if defined(QUERN_GEMM_KERNELS_REGISTER_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_GEMM_KERNELS_REGISTER_TILE_INL_H_
#undef QUERN_GEMM_KERNELS_REGISTER_TILE_INL_H_
#else
#define QUERN_GEMM_KERNELS_REGISTER_TILE_INL_H_
#endif
// clang-format on

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "quern/core/dtype.h"
#include "quern/quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr size_t kLineWords = 16;

// Lanes of one line. Where the vector length is not known to the compiler, 128
// bits serve.
#if HWY_HAVE_SCALABLE
template <typename T>
using LineTag = hn::FixedTag<T, 16 / sizeof(T)>;
#else
template <typename T>
using LineTag = hn::CappedTag<T, 4 * kLineWords / sizeof(T)>;
#endif

// Products and sums in f32: a word is the bits of a float.
struct FmaSums {
  using D = LineTag<float>;
  using DU = hn::RebindToUnsigned<D>;
  static HWY_INLINE hn::Vec<D> MulAdd(hn::Vec<D> b, uint32_t word,
                                      hn::Vec<D> sum) {
    return hn::MulAdd(hn::BitCast(D(), hn::Set(DU(), word)), b, sum);
  }
};

// Lines of f32.
struct DotF32 : FmaSums {
  static constexpr size_t kSub = 1;
  static constexpr size_t kWordElements = 1;
  template <size_t kI>
  static HWY_INLINE hn::Vec<D> LoadB(const uint8_t* HWY_RESTRICT line) {
    return hn::LoadU(D(), reinterpret_cast<const float*>(line));
  }
  template <size_t kI>
  static HWY_INLINE hn::Vec<D> LoadNB(const uint8_t* HWY_RESTRICT line,
                                      size_t n) {
    return hn::LoadN(D(), reinterpret_cast<const float*>(line), n);
  }
};

// Lines of pairs of bf16 or f16 by f32, to which widening is exact. The lower
// bf16 of a pair moves up, the upper one loses the lower bits.
template <typename T>
struct DotPairsF32 : FmaSums {
  static constexpr size_t kSub = 2;
  static constexpr size_t kWordElements = 2;
  template <size_t kI>
  static HWY_INLINE hn::Vec<D> LoadB(const uint8_t* HWY_RESTRICT line) {
    return Widen<kI>(hn::LoadU(DU(), reinterpret_cast<const uint32_t*>(line)));
  }
  template <size_t kI>
  static HWY_INLINE hn::Vec<D> LoadNB(const uint8_t* HWY_RESTRICT line,
                                      size_t n) {
    return Widen<kI>(
        hn::LoadN(DU(), reinterpret_cast<const uint32_t*>(line), n));
  }

 private:
  template <size_t kI>
  static HWY_INLINE hn::Vec<D> Widen(hn::Vec<DU> pairs) {
    if constexpr (hwy::IsSame<T, BFloat16>()) {
      return hn::BitCast(D(), kI == 0
                                  ? hn::ShiftLeft<16>(pairs)
                                  : hn::And(pairs, hn::Set(DU(), 0xFFFF0000u)));
    } else {
      const hn::Rebind<uint16_t, D> du16;
      return DecodeCodes<T>(
          D(),
          hn::TruncateTo(du16, kI == 0 ? pairs : hn::ShiftRight<16>(pairs)));
    }
  }
};

#if HWY_NATIVE_DOT_BF16
// Lines of pairs of bf16 by pairs of bf16, summed in f32.
struct DotPairsBF16 {
  using D = LineTag<float>;
  using DB = hn::Repartition<hwy::bfloat16_t, D>;
  using DU = hn::RebindToUnsigned<D>;
  static constexpr size_t kSub = 1;
  static constexpr size_t kWordElements = 2;
  template <size_t kI>
  static HWY_INLINE hn::Vec<DB> LoadB(const uint8_t* HWY_RESTRICT line) {
    return hn::LoadU(DB(), reinterpret_cast<const hwy::bfloat16_t*>(line));
  }
  template <size_t kI>
  static HWY_INLINE hn::Vec<DB> LoadNB(const uint8_t* HWY_RESTRICT line,
                                       size_t n) {
    return hn::BitCast(
        DB(), hn::LoadN(DU(), reinterpret_cast<const uint32_t*>(line), n));
  }
  static HWY_INLINE hn::Vec<D> MulAdd(hn::Vec<DB> b, uint32_t word,
                                      hn::Vec<D> sum) {
    auto unused = hn::Zero(D());  // native: all goes to the first sum
    return hn::ReorderWidenMulAccumulate(
        D(), hn::BitCast(DB(), hn::Set(DU(), word)), b, sum, unused);
  }
};
#endif

// One line, or its half kI. `line(v)` is where vector v of the tile is read
// from, and row r has its word at words + r * stride. kTail: only the first
// `valid` words of each vector are there.
template <class Dot, size_t kI, bool kTail, class Line, size_t kRows,
          size_t kVecs>
HWY_INLINE void HalfStep(const uint32_t* HWY_RESTRICT words, size_t stride,
                         const Line& line, size_t valid,
                         hn::Vec<typename Dot::D> (&sums)[kRows][kVecs]) {
  decltype(Dot::template LoadB<kI>(line(0))) operand[kVecs];
  HWY_UNROLL(8)
  for (size_t v = 0; v < kVecs; ++v) {
    if constexpr (kTail) {
      operand[v] = Dot::template LoadNB<kI>(line(v), valid);
    } else {
      operand[v] = Dot::template LoadB<kI>(line(v));
    }
  }
  HWY_UNROLL(16)
  for (size_t r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (size_t v = 0; v < kVecs; ++v) {
      sums[r][v] = Dot::MulAdd(operand[v], words[r * stride], sums[r][v]);
    }
  }
}

template <class Dot, bool kTail, class Line, size_t kRows, size_t kVecs>
HWY_INLINE void Step(const uint32_t* HWY_RESTRICT words, size_t stride,
                     const Line& line, size_t valid,
                     hn::Vec<typename Dot::D> (&sums)[kRows][kVecs]) {
  HalfStep<Dot, 0, kTail>(words, stride, line, valid, sums);
  if constexpr (Dot::kSub == 2) {
    HalfStep<Dot, 1, kTail>(words + 1, stride, line, valid, sums);
  }
}

template <class D, size_t kRows, size_t kVecs>
HWY_INLINE void ClearSums(hn::Vec<D> (&sums)[kRows][kVecs]) {
  HWY_UNROLL(16)
  for (size_t r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (size_t v = 0; v < kVecs; ++v) sums[r][v] = hn::Zero(D());
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
