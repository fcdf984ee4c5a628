#include "quern/cache/group_kv_kernels.h"
#include "quern/core/sets/avx3.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cache/group_kv_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.
#include "hwy/highway.h"
#include "quern/cache/load_blocks-inl.h"
#include "quern/core/prefetch.h"
#include "quern/quant/convert-inl.h"
#include "quern/quant/e4m3_pairs-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_ARCH_X86
using D16 = Tag<uint16_t>;
using D8 = hn::Repartition<uint8_t, D16>;
using DF = hn::Repartition<float, D16>;
constexpr size_t kBlocks = BlocksOf<D16>();
// Rows that a block goes through: those of one vector are this far apart.
constexpr size_t kRowsOfBlock = 8;
// Elements of bf16 in a block, and in a cache line.
constexpr size_t kElements = kBlockBytes / 2;
constexpr size_t kLine = 32;

// Two rows of bf16, a and b, to codes: in each block of 16 bytes 8 of a, then 8
// of b. own_scales of GetGroupKvKernels is kFits, else kAny.
template <typename To, CodeRange kRange>
struct Codes;

template <CodeRange kRange>
struct Codes<Float8E4M3, kRange> {
  static HWY_INLINE hn::Vec<D8> Of(hn::Vec<D16> a, hn::Vec<DF> factor_a,
                                   hn::Vec<D16> b, hn::Vec<DF> factor_b) {
    const D16 d16;
    return PackE4M3Blocks(d16, E4M3Magnitudes<kRange>(d16, a, factor_a),
                          E4M3Magnitudes<kRange>(d16, b, factor_b), a, b);
  }
};

template <CodeRange kRange>
struct Codes<int8_t, kRange> {
  static HWY_INLINE hn::Vec<D8> Of(hn::Vec<D16> a, hn::Vec<DF> factor_a,
                                   hn::Vec<D16> b, hn::Vec<DF> factor_b) {
    const hn::RebindToSigned<D8> di8;
    return hn::BitCast(D8(), hn::ReorderDemote2To(di8, Steps(a, factor_a),
                                                  Steps(b, factor_b)));
  }

 private:
  using DI16 = hn::RebindToSigned<D16>;
  static HWY_INLINE hn::Vec<DI16> Steps(hn::Vec<D16> x, hn::Vec<DF> factor) {
    const DF df;
    const hn::RebindToUnsigned<DF> du;
    const DI16 di16;
    const auto even = Step(hn::Mul(EvenF32(df, x), factor));
    const auto odd = Step(hn::Mul(OddF32(df, x), factor));
    return hn::OddEven(
        hn::BitCast(di16, hn::ShiftLeft<16>(hn::BitCast(du, odd))),
        hn::BitCast(di16, even));
  }
  // The integer is in the lower 16 bits.
  static HWY_INLINE hn::Vec<DF> Step(hn::Vec<DF> v) {
    const DF df;
    if constexpr (kRange == CodeRange::kAny) {
      v = hn::IfThenElseZero(hn::Eq(v, v), v);  // NaN
      v = hn::Max(hn::Min(v, hn::Set(df, 127.0f)), hn::Set(df, -127.0f));
    }
    // The unit in the last place of the sum is 1: it rounds as asked.
    return hn::Add(Product(v), hn::Set(df, 0x1.8p23f));
  }
  // Keeps GCC from fusing the product with the addition: it is rounded first.
  static HWY_INLINE hn::Vec<DF> Product(hn::Vec<DF> v) {
#if HWY_COMPILER_GCC_ACTUAL
    asm("" : "+v"(v.raw));
#endif
    return v;
  }
};

// factor[0] in the first block, factor[kRowsOfBlock] in the second.
template <class D>
HWY_INLINE hn::Vec<D> FactorBlocks(D d, const float* factor) {
  if constexpr (BlocksOf<D>() == 1) {
    return hn::Set(d, *factor);
  } else {
    const hn::Half<D> dh;
    return hn::Combine(
        d, FactorBlocks(dh, factor + BlocksOf<D>() / 2 * kRowsOfBlock),
        FactorBlocks(dh, factor));
  }
}

// The rows r and r + 4, and those a block further.
template <class C>
HWY_INLINE hn::Vec<D16> TwoRows(const uint8_t* const* rows, size_t at,
                                const float* factors, size_t r) {
  const DF df;
  const D16 d16;
  constexpr size_t kLanes = hn::MaxLanes(DF());
  return hn::BitCast(d16, C::Of(LoadBlocks(d16, rows + r, kRowsOfBlock, at),
                                hn::Load(df, factors + r * kLanes),
                                LoadBlocks(d16, rows + r + 4, kRowsOfBlock, at),
                                hn::Load(df, factors + (r + 4) * kLanes)));
}

// 8 elements, which are 4 cells, of as many rows as a vector has lanes.
template <class C, bool kStream>
HWY_INLINE void FourCells(const uint8_t* const* rows, size_t at,
                          const float* factors, uint8_t* to) {
  const D16 d16;
  const hn::Repartition<uint32_t, D16> d32;
  const hn::Repartition<uint64_t, D16> d64;
  const auto r04 = TwoRows<C>(rows, at, factors, 0);
  const auto r15 = TwoRows<C>(rows, at, factors, 1);
  const auto r26 = TwoRows<C>(rows, at, factors, 2);
  const auto r37 = TwoRows<C>(rows, at, factors, 3);
  const auto r01 = hn::BitCast(d32, hn::InterleaveLower(d16, r04, r15));
  const auto r45 = hn::BitCast(d32, hn::InterleaveUpper(d16, r04, r15));
  const auto r23 = hn::BitCast(d32, hn::InterleaveLower(d16, r26, r37));
  const auto r67 = hn::BitCast(d32, hn::InterleaveUpper(d16, r26, r37));
  // Cells 0 and 1, then 2 and 3, of rows 0 to 3 and 4 to 7.
  const auto c01 = hn::BitCast(d64, hn::InterleaveLower(d32, r01, r23));
  const auto c23 = hn::BitCast(d64, hn::InterleaveUpper(d32, r01, r23));
  const auto e01 = hn::BitCast(d64, hn::InterleaveLower(d32, r45, r67));
  const auto e23 = hn::BitCast(d64, hn::InterleaveUpper(d32, r45, r67));
  auto* cells = reinterpret_cast<uint16_t*>(to);
  StoreOrStream<kStream>(hn::BitCast(d16, hn::InterleaveLower(d64, c01, e01)),
                         d16, cells);
  StoreOrStream<kStream>(hn::BitCast(d16, hn::InterleaveUpper(d64, c01, e01)),
                         d16, cells + kTokens);
  StoreOrStream<kStream>(hn::BitCast(d16, hn::InterleaveLower(d64, c23, e23)),
                         d16, cells + 2 * kTokens);
  StoreOrStream<kStream>(hn::BitCast(d16, hn::InterleaveUpper(d64, c23, e23)),
                         d16, cells + 3 * kTokens);
}

template <class C, bool kStream>
HWY_INLINE void KeysTo(const uint8_t* const* rows, const uint8_t* const* ahead,
                       size_t count, const float* inverse, uint8_t* to) {
  const DF df;
  constexpr size_t kLanes = hn::MaxLanes(DF());
  constexpr size_t kRows = kBlocks * kRowsOfBlock;
  constexpr size_t kSteps = kLine / kElements;
  for (size_t first = 0; first < kTokens; first += kRows) {
    HWY_ALIGN float factors[kRowsOfBlock * kLanes];
    for (size_t r = 0; r < kRowsOfBlock; ++r) {
      hn::Store(FactorBlocks(df, inverse + first + r), df,
                factors + r * kLanes);
    }
    for (size_t i = 0; i < count; i += kElements) {
      // Each step fetches one line of some rows.
      const size_t step = i / kElements % kSteps;
      for (size_t r = 0; r < kRows / kSteps; ++r) {
        PrefetchL2(ahead[first + step * (kRows / kSteps) + r] +
                   i / kLine * (2 * kLine));
      }
      FourCells<C, kStream>(rows + first, 2 * i, factors,
                            to + i * kTokens + 2 * first);
    }
  }
}

template <class C>
void Keys(const uint8_t* const* rows, const uint8_t* const* ahead, size_t count,
          const float* inverse, bool stream, uint8_t* to) {
  if (stream && IsVectorAligned(to)) {
    return KeysTo<C, true>(rows, ahead, count, inverse, to);
  }
  KeysTo<C, false>(rows, ahead, count, inverse, to);
}

// In each block, 8 bytes of one row and 8 of another to pairs of both.
HWY_INLINE hn::Vec<D8> PairBytes(hn::Vec<D8> v) {
  const D8 d8;
  return hn::TableLookupBytes(
      v, hn::Dup128VecFromValues(d8, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6,
                                 14, 7, 15));
}

template <class C, bool kStream>
HWY_INLINE void ValuesTo(const uint8_t* const* rows,
                         const uint8_t* const* ahead, size_t count,
                         const float* inverse, uint8_t* to) {
  const DF df;
  const D16 d16;
  const D8 d8;
  constexpr size_t kLanes = hn::MaxLanes(D16());
  for (size_t r = 0; r < kTokens; r += 2, to += 2 * count) {
    const auto* even = reinterpret_cast<const uint16_t*>(rows[r]);
    const auto* odd = reinterpret_cast<const uint16_t*>(rows[r + 1]);
    const auto factor_even = hn::Set(df, inverse[r]);
    const auto factor_odd = hn::Set(df, inverse[r + 1]);
    for (size_t i = 0; i < count; i += kLanes) {
      // A line of each row in turn.
      const size_t row = i / (kLine / 2) % 2;
      PrefetchL2(ahead[r + row] + i / kLine * (2 * kLine));
      const auto codes = C::Of(hn::LoadU(d16, even + i), factor_even,
                               hn::LoadU(d16, odd + i), factor_odd);
      StoreOrStream<kStream>(PairBytes(codes), d8, to + 2 * i);
    }
  }
}

template <class C>
void Values(const uint8_t* const* rows, const uint8_t* const* ahead,
            size_t count, const float* inverse, bool stream, uint8_t* to) {
  if (stream && IsVectorAligned(to)) {
    return ValuesTo<C, true>(rows, ahead, count, inverse, to);
  }
  ValuesTo<C, false>(rows, ahead, count, inverse, to);
}

template <typename To>
GroupKvKernels KernelsTo(bool own_scales) {
  using Own = Codes<To, CodeRange::kFits>;
  using Any = Codes<To, CodeRange::kAny>;
  GroupKvKernels kernels;
  kernels.keys = own_scales ? &Keys<Own> : &Keys<Any>;
  kernels.values = own_scales ? &Values<Own> : &Values<Any>;
  return kernels;
}
#endif

GroupKvKernels GetKernels(DType cache, bool own_scales) {
#if HWY_ARCH_X86
  if (cache == DType::kI8) return KernelsTo<int8_t>(own_scales);
  if (cache == DType::kF8E4M3) return KernelsTo<Float8E4M3>(own_scales);
#endif
  (void)cache;
  (void)own_scales;
  return GroupKvKernels();
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
GroupKvKernels GetGroupKvKernels(DType input, DType cache, bool own_scales) {
  if (input != DType::kBF16) return GroupKvKernels();
  return HWY_DYNAMIC_DISPATCH(GetKernels)(cache, own_scales);
}
}  // namespace quern
#endif  // HWY_ONCE
