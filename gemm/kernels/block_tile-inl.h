// The arithmetic of gemm/kernels/block_kernels.h, once per instruction set, for
// any source of decoded quads and scales:
//
//   Source(b, v)                  of block b, and vector v of all panels
//   VB Codes<step>(b, v)          the codes of an operand of the Dot
//   VF Scale(s, v), Min(s, v)     of sub-block s of the record

// clang-format off
#if defined(QUERN_GEMM_KERNELS_BLOCK_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_GEMM_KERNELS_BLOCK_TILE_INL_H_
#undef QUERN_GEMM_KERNELS_BLOCK_TILE_INL_H_
#else
#define QUERN_GEMM_KERNELS_BLOCK_TILE_INL_H_
#endif
// clang-format on

#include <cstddef>
#include <cstdint>

#include "hwy/base.h"
#include "hwy/highway.h"
#include "quern/core/prefetch.h"
#include "quern/core/registers-inl.h"
#include "quern/gemm/kernels/block_dot-inl.h"
#include "quern/gemm/kernels/block_kernels.h"
#include "quern/gemm/weights/block_traits.h"
#include "quern/packing/block_panels.h"
#include "quern/quant/block_format.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// What of a format decides how decoded codes are multiplied: formats that agree
// share tiles.
template <size_t kSubBlockK, bool kHasZero, bool kHasMins, class DotType>
struct BlockArithmetic {
  using Dot = DotType;
  static constexpr size_t kSubs = BlockPanels::kBlockK / kSubBlockK;
  static constexpr size_t kSubSteps = Dot::kBlockSteps / kSubs;
  static constexpr size_t kGroup =
      Dot::kGroup < kSubSteps ? Dot::kGroup : kSubSteps;
  static constexpr bool kZero = kHasZero;
  static constexpr bool kMins = kHasMins;
  static_assert(!kZero || kGroup == kSubSteps, "terms start one group");
};

template <BlockFormat kFormat>
using ArithmeticOf =
    BlockArithmetic<BlockTraitsOf(kFormat).codes.sub_block,
                    TermsOf(BlockTraitsOf(kFormat)).zero != 0,
                    BlockTraitsOf(kFormat).has_mins(), DotOf<kFormat>>;

// What of a row meets operand `step`, counted from its first code.
template <class Code>
HWY_INLINE VS BroadcastStep(const Code* HWY_RESTRICT codes, size_t step) {
  uint32_t four_bytes;
  hwy::CopyBytes<4>(codes + step * (4 / sizeof(Code)), &four_bytes);
  return hn::BitCast(DS(), hn::Set(DU(), four_bytes));
}

// Adds operands [kStep, kEnd) of block b. kBegun: sums hold something.
template <class Dot, size_t kStep, size_t kEnd, bool kBegun, class Source,
          size_t kRows, size_t kWidth>
HWY_INLINE void AddSteps(const Source& source, size_t b,
                         const typename Dot::Row* HWY_RESTRICT rows,
                         typename Dot::Sums (&sums)[kRows][kWidth]) {
  if constexpr (kStep < kEnd) {
    typename Dot::Operand operand[kWidth];
    HWY_UNROLL(8)
    for (size_t v = 0; v < kWidth; ++v) {
      operand[v] = Dot::Prepare(source.template Codes<kStep>(b, v));
    }
    HWY_UNROLL(16)
    for (size_t r = 0; r < kRows; ++r) {
      const auto a = BroadcastStep(rows[r].codes, Dot::kBlockSteps * b + kStep);
      HWY_UNROLL(8)
      for (size_t v = 0; v < kWidth; ++v) {
        if constexpr (kBegun) {
          sums[r][v] = Dot::Add(operand[v], a, sums[r][v]);
        } else {
          sums[r][v] = Dot::Begin(operand[v], a);
        }
      }
    }
    AddSteps<Dot, kStep + 1, kEnd, true>(source, b, rows, sums);
  }
}

// dots = the i32 dot products of operands [kStep, kEnd) of block b, group by
// group.
template <class A, size_t kStep, size_t kEnd, bool kFirst, class Source,
          size_t kRows, size_t kWidth>
HWY_INLINE void DotGroups(const Source& source, size_t b, size_t sub,
                          const typename A::Dot::Row* HWY_RESTRICT rows,
                          VI (&dots)[kRows][kWidth]) {
  if constexpr (kStep < kEnd) {
    using Dot = typename A::Dot;
    typename Dot::Sums sums[kRows][kWidth];
    if constexpr (A::kZero) {
      HWY_UNROLL(16)
      for (size_t r = 0; r < kRows; ++r) {
        const auto start = Dot::Start(rows[r].terms[sub]);
        HWY_UNROLL(8)
        for (size_t v = 0; v < kWidth; ++v) sums[r][v] = start;
      }
    }
    AddSteps<Dot, kStep, kStep + A::kGroup, A::kZero>(source, b, rows, sums);
    HWY_UNROLL(16)
    for (size_t r = 0; r < kRows; ++r) {
      HWY_UNROLL(8)
      for (size_t v = 0; v < kWidth; ++v) {
        const auto wide = Dot::Widen(sums[r][v]);
        dots[r][v] = kFirst ? wide : hn::Add(dots[r][v], wide);
      }
    }
    DotGroups<A, kStep + A::kGroup, kEnd, false>(source, b, sub, rows, dots);
  }
}

// Adds sub-blocks [kSub, A::kSubs) of block b to the sums.
template <class A, size_t kSub, class Source, size_t kRows, size_t kWidth>
HWY_INLINE void AddSubBlocks(const Source& source, size_t b,
                             const typename A::Dot::Row* HWY_RESTRICT rows,
                             VF (&sums)[kRows][kWidth]) {
  if constexpr (kSub < A::kSubs) {
    const DF df;
    const size_t sub = b * A::kSubs + kSub;
    VI dots[kRows][kWidth];
    DotGroups<A, kSub * A::kSubSteps, (kSub + 1) * A::kSubSteps, true>(
        source, b, sub, rows, dots);
    VF s[kWidth];
    HWY_UNROLL(8)
    for (size_t v = 0; v < kWidth; ++v) s[v] = source.Scale(sub, v);
    HWY_UNROLL(16)
    for (size_t r = 0; r < kRows; ++r) {
      const auto ax = hn::Set(df, rows[r].scales[b]);
      HWY_UNROLL(8)
      for (size_t v = 0; v < kWidth; ++v) {
        sums[r][v] = hn::MulAdd(hn::Mul(s[v], ax),
                                hn::ConvertTo(df, dots[r][v]), sums[r][v]);
      }
    }
    if constexpr (A::kMins) {
      VF t[kWidth];
      HWY_UNROLL(8)
      for (size_t v = 0; v < kWidth; ++v) t[v] = source.Min(sub, v);
      HWY_UNROLL(16)
      for (size_t r = 0; r < kRows; ++r) {
        const auto xs =
            hn::Set(df, hwy::BitCastScalar<float>(rows[r].terms[sub]));
        HWY_UNROLL(8)
        for (size_t v = 0; v < kWidth; ++v) {
          sums[r][v] = hn::NegMulAdd(t[v], xs, sums[r][v]);
        }
      }
    }
    AddSubBlocks<A, kSub + 1>(source, b, rows, sums);
  }
}

// Sums that TileArgs::sums holds, or zeros.
template <size_t kRows, size_t kWidth>
HWY_INLINE void LoadSums(const TileArgs& t, VF (&sums)[kRows][kWidth]) {
  const DF df;
  const float* HWY_RESTRICT from = static_cast<const float*>(t.sums);
  HWY_UNROLL(16)
  for (size_t r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (size_t v = 0; v < kWidth; ++v) {
      sums[r][v] = t.add ? hn::LoadU(df, from + r * t.sums_stride + v * kFloats)
                         : hn::Zero(df);
    }
  }
}

template <size_t kRows, size_t kWidth>
HWY_INLINE void StoreSums(const TileArgs& t, VF (&sums)[kRows][kWidth]) {
  float* HWY_RESTRICT to = static_cast<float*>(t.sums);
  HWY_UNROLL(16)
  for (size_t r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (size_t v = 0; v < kWidth; ++v) {
      hn::StoreU(sums[r][v], DF(), to + r * t.sums_stride + v * kFloats);
    }
  }
}

// Fetches the eighth of `next` that goes with block b.
template <size_t kStreams>
HWY_INLINE void Fetch(const TilePrefetch& next, size_t b) {
  const size_t part = (next.lines + 7) / 8;
  const size_t end = HWY_MIN((b + 1) * part, next.lines);
  for (size_t line = b * part; line < end; ++line) {
    HWY_UNROLL(2)
    for (size_t p = 0; p < kStreams; ++p) {
      PrefetchL2(next.from + p * next.stream_bytes +
                 line * BlockPanels::kLineBytes);
    }
  }
}

// A DecodedRecord of each panel, whose blocks have kBlockSteps lines.
template <size_t kBlockSteps>
struct DecodedSource {
  template <size_t kStep>
  HWY_INLINE VB Codes(size_t b, size_t v) const {
    return hn::LoadU(
        DB(), Panel(v)->lines[b * kBlockSteps + kStep] + v % kVecs * kVecBytes);
  }
  HWY_INLINE VF Scale(size_t sub, size_t v) const {
    return hn::LoadU(DF(), Panel(v)->s[sub] + v % kVecs * kFloats);
  }
  HWY_INLINE VF Min(size_t sub, size_t v) const {
    return hn::LoadU(DF(), Panel(v)->t[sub] + v % kVecs * kFloats);
  }
  HWY_INLINE const DecodedRecord* Panel(size_t v) const {
    return records + v / kVecs;
  }
  const DecodedRecord* HWY_RESTRICT records;
};

template <class A, size_t kRows, size_t kPanels>
void DecodedTile(const TileArgs& t) {
  VF sums[kRows][kPanels * kVecs];
  LoadSums(t, sums);
  const DecodedSource<A::Dot::kBlockSteps> source = {
      reinterpret_cast<const DecodedRecord*>(t.b)};
  const auto* rows = reinterpret_cast<const typename A::Dot::Row*>(t.a);
  for (size_t b = 0; b < t.steps; ++b) {
    Fetch<kPanels>(t.prefetch[0], b);
    AddSubBlocks<A, 0>(source, b, rows, sums);
  }
  StoreSums(t, sums);
}

// Few and small tiles under sanitizers, as in gemm/kernels/tile-inl.h.
constexpr bool kFewTiles = HWY_IS_ASAN || HWY_IS_TSAN || HWY_IS_MSAN;

// Dot products of one sub-block that stay in registers, in vectors.
constexpr size_t kMostDots = kManyRegisters ? 12 : 8;
constexpr size_t kDecodedRows = kFewTiles ? 3
                                          : (kVecs == 1   ? 6
                                             : kVecs == 2 ? 4
                                                          : 2);

template <class A>
struct DecodedTiles {
  static constexpr size_t kMostRows = kDecodedRows;
  static constexpr bool Has(size_t rows, size_t panels) {
    return panels == 1 ||
           (panels <= kBlockPanels && rows * panels * kVecs <= kMostDots);
  }
  template <size_t kRows, size_t kPanels>
  static constexpr Tile kTile = &DecodedTile<A, kRows, kPanels>;
};

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
