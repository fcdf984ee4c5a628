// Dot products of quads of codes by quads of int8, once per instruction set.
//
// A Dot sums as many quads as one sub-block has, exactly:
//
//   Row                      BlockRow or WordRow
//   kBlockSteps              operands that the 32 k of a block take
//   Sums                     a vector of running sums
//   kGroup                   operands that may be added to one Sums
//   Prepare(codes)           an operand from a decoded line: a quad of bytes or
//                            half of one, as words
//   Start(term)              sums that begin with BlockRow::terms, where there
//                            are any
//   Begin(operand, a)        sums of a first operand
//   Add(operand, a, sums)    adds another
//   Widen(sums)              the i32 sum of each column

// clang-format off
#if defined(QUERN_GEMM_KERNELS_BLOCK_DOT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_GEMM_KERNELS_BLOCK_DOT_INL_H_
#undef QUERN_GEMM_KERNELS_BLOCK_DOT_INL_H_
#else
#define QUERN_GEMM_KERNELS_BLOCK_DOT_INL_H_
#endif
// clang-format on

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "quern/core/quad_dot-inl.h"
#include "quern/gemm/kernels/register_tile-inl.h"
#include "quern/gemm/weights/block_traits.h"
#include "quern/packing/block_panels.h"
#include "quern/quant/block_format.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using DI = LineTag<int32_t>;
using DF = LineTag<float>;
using DU = LineTag<uint32_t>;
using DW = hn::Repartition<int16_t, DI>;
using DB = hn::Repartition<uint8_t, DI>;
using DS = hn::Repartition<int8_t, DI>;
using VI = hn::Vec<DI>;
using VF = hn::Vec<DF>;
using VW = hn::Vec<DW>;
using VB = hn::Vec<DB>;
using VS = hn::Vec<DS>;

constexpr size_t kFloats = HWY_MAX_LANES_D(DF);
constexpr size_t kVecBytes = 4 * kFloats;
// Vectors of one line, that is of 16 columns.
constexpr size_t kVecs = BlockPanels::kPanelCols / kFloats;

constexpr int kMaxInt8 = 127;  // |qa|, at most

// Where codes are multiplied by vpdpbusd, those of int8 are u8, with a zero
// point of 128. Else pairs are multiplied by vpmaddubsw, or what Highway has
// for it.
constexpr BlockTerms TermsOf(const BlockTraits& traits) {
  const int zero = QUERN_HAS_VPDPBUSD && traits.is_int8() ? 128 : traits.zero;
  return {traits.codes.sub_block, zero, traits.has_mins()};
}

#if QUERN_HAS_VPDPBUSD

struct QuadDot {
  using Row = BlockRow;
  using Sums = VI;
  using Operand = VB;
  static constexpr size_t kBlockSteps = BlockPanels::kBlockQuads;
  static constexpr size_t kGroup = kBlockSteps;

  static HWY_INLINE Operand Prepare(VB codes) { return codes; }
  static HWY_INLINE Sums Start(uint32_t term) {
    return hn::BitCast(DI(), hn::Set(DU(), term));
  }
  static HWY_INLINE Sums Begin(Operand b, VS a) {
    return Add(b, a, hn::Zero(DI()));
  }
  static HWY_INLINE Sums Add(Operand b, VS a, Sums sums) {
    return DotQuads(DI(), b, a, sums);
  }
  static HWY_INLINE VI Widen(Sums sums) { return sums; }
};

template <BlockFormat>
using DotOf = QuadDot;

#else

// Returns `sums`, which the compiler must have by then: GCC 12 reorders
// additions of integers, so that it multiplies all quads of a block before it
// adds the first product, and keeps products in memory.
template <class V>
HWY_INLINE V InOrder(V sums) {
#if HWY_COMPILER_GCC_ACTUAL && HWY_ARCH_X86 && HWY_TARGET != HWY_EMU128
  asm("" : "+v"(sums.raw));
#endif
  return sums;
}

// Unsigned codes. Pairs of products are summed in 16 bits, as many as fit: that
// is two additions in place of three for each quad.
template <size_t kQuads>
struct PairDot {
  using Row = BlockRow;
  using Sums = VW;
  using Operand = VB;
  static constexpr size_t kBlockSteps = BlockPanels::kBlockQuads;
  static constexpr size_t kGroup = kQuads;

  static HWY_INLINE Operand Prepare(VB codes) { return codes; }
  static HWY_INLINE Sums Start(uint32_t term) {
    return hn::BitCast(DW(), hn::Set(DU(), term));
  }
  static HWY_INLINE Sums Begin(Operand b, VS a) {
    return hn::SatWidenMulPairwiseAdd(DW(), b, a);
  }
  static HWY_INLINE Sums Add(Operand b, VS a, Sums sums) {
    return InOrder(hn::Add(sums, Begin(b, a)));
  }
  static HWY_INLINE VI Widen(Sums sums) {
    return hn::WidenMulPairwiseAdd(DI(), sums, hn::Set(DW(), int16_t{1}));
  }
};

// Codes of int8 as words of 16 bits, 2^8 times the code (WordsOf). A quad takes
// two multiplications and two additions; as bytes, whose sign goes to the other
// factor, it would take three multiplications and one addition, on the two
// units of an AMD core that multiply integers.
struct WordDot {
  using Row = WordRow;
  using Sums = VI;
  using Operand = VW;
  static constexpr size_t kBlockSteps = 2 * BlockPanels::kBlockQuads;
  static constexpr size_t kGroup = kBlockSteps;

  static HWY_INLINE Operand Prepare(VB codes) {
    return hn::BitCast(DW(), codes);
  }
  static HWY_INLINE Sums Begin(Operand b, VS a) {
    return hn::WidenMulPairwiseAdd(DI(), b, hn::BitCast(DW(), a));
  }
  static HWY_INLINE Sums Add(Operand b, VS a, Sums sums) {
    return InOrder(hn::Add(sums, Begin(b, a)));
  }
  static_assert(32 * 128 * kMaxInt8 < 1 << (31 - 8), "a sum would wrap");
  static HWY_INLINE VI Widen(Sums sums) { return hn::ShiftRight<8>(sums); }
};

// How many quads of a sub-block may be added in 16 bits.
//
// With a zero point, all: sums begin with -zero times those of the same qa, so
// that in the end each is one of (value - zero) * qa over half a sub-block.
// What overflows on the way is undone, because additions wrap; only the product
// of a pair must not saturate.
template <BlockFormat kFormat>
constexpr size_t QuadsInPairs() {
  constexpr BlockTraits kTraits = BlockTraitsOf(kFormat);
  constexpr int kMost = kTraits.max_value;
  static_assert(2 * kMost * kMaxInt8 < 1 << 15, "a pair would saturate");
  constexpr int kSubQuads = kTraits.codes.sub_block / 4;
  if (kTraits.zero != 0) {
    constexpr int kAbove = kMost - kTraits.zero;
    constexpr int kFar = kAbove > kTraits.zero ? kAbove : kTraits.zero;
    static_assert(
        kTraits.zero == 0 || 2 * kSubQuads * kFar * kMaxInt8 < 1 << 15,
        "the sum of half a sub-block would wrap");
    return kSubQuads;
  }
  int quads = kSubQuads;
  while (quads * 2 * kMost * kMaxInt8 >= 1 << 15) quads /= 2;
  return static_cast<size_t>(quads);
}

template <BlockFormat kFormat, bool kInt8 = BlockTraitsOf(kFormat).is_int8()>
struct DotSelector {
  using Type = WordDot;
};
template <BlockFormat kFormat>
struct DotSelector<kFormat, false> {
  using Type = PairDot<QuadsInPairs<kFormat>()>;
};
template <BlockFormat kFormat>
using DotOf = typename DotSelector<kFormat>::Type;

#endif  // QUERN_HAS_VPDPBUSD

template <BlockFormat kFormat>
using RowOf = typename DotOf<kFormat>::Row;
template <BlockFormat kFormat>
constexpr bool kHasWords = hwy::IsSame<RowOf<kFormat>, WordRow>();

// Half kHalf of quads of int8, as words of 2^8 times the code: bytes 0 and 2,
// or bytes 1 and 3. Words of the codes themselves would take three shifts in
// place of one and an And, which any unit does.
template <size_t kHalf>
HWY_INLINE VW WordsOf(VB quads) {
  const auto words = hn::BitCast(DW(), quads);
  return kHalf == 0 ? hn::ShiftLeft<8>(words)
                    : hn::And(words, hn::Set(DW(), int16_t{-256}));
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
