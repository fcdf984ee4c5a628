#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "quern/core/dtype.h"
#include "quern/core/float_type.h"
#include "quern/core/isa.h"
#include "quern/core/kernel_set.h"
#include "quern/core/sets/avx3_dl.h"
#include "quern/gemm/kernels/i4_block_kernels.h"

// Compiled once per instruction set: foreach_target.h re-includes this file.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gemm/kernels/i4_block_simd.cc"
// foreach_target.h comes first, whatever the alphabet says.
// clang-format off
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "quern/quant/convert-inl.h"
#include "quern/core/quad_dot-inl.h"
#include "quern/core/prefetch.h"
#include "quern/gemm/kernels/block_record-inl.h"
#include "quern/gemm/kernels/block_rows-inl.h"
#include "quern/gemm/weights/block_traits.h"
#include "quern/gemm/kernels/tile.h"
#include "quern/packing/block_panels.h"
#include "quern/quant/block_format.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Codes without zero points are multiplied as those of Q4_0 are, less 8. With
// zero points they become code - zero + 16, which is in [0, 31], and are
// multiplied as those of Q5_0 are, less 16. Both have the same tiles: the terms
// of rows differ.
constexpr BlockFormat kPlain = BlockFormat::kQ4_0;
constexpr BlockFormat kWithZeros = BlockFormat::kQ5_0;
using I4Arithmetic = ArithmeticOf<kPlain>;
static_assert(hwy::IsSame<I4Arithmetic, ArithmeticOf<kWithZeros>>(),
              "zero points need tiles of their own");

// A source of gemm/kernels/block_tile-inl.h: blocks of a panel, one after the
// other.
template <bool kZeros>
class I4Record {
 public:
  HWY_INLINE I4Record(const uint8_t* HWY_RESTRICT lines, const I4Groups& groups)
      : lines_(lines),
        scales_(groups.scales),
        zeros_(groups.zeros),
        group_blocks_(groups.group_blocks),
        left_(groups.group_blocks - groups.first) {
    LoadGroup();
  }

  // Must be called before each block.
  HWY_INLINE void Begin() {
    if (HWY_UNLIKELY(left_ == 0)) {
      left_ = group_blocks_;
      scales_ += BlockPanels::kPanelCols;
      if constexpr (kZeros) zeros_ += BlockPanels::kPanelCols;
      LoadGroup();
    }
    --left_;
  }

  template <size_t kQuad>
  HWY_INLINE VB Codes(size_t b, size_t v) const {
    constexpr size_t kBlockBytes = 4 * BlockPanels::kLineBytes;
    const auto line = hn::LoadU(DB(), lines_ + b * kBlockBytes +
                                          kQuad / 2 * BlockPanels::kLineBytes +
                                          v * kVecBytes);
    const auto codes = MoveBits<4, 4 * (kQuad % 2), 0>(line);
    if constexpr (kZeros) {
      return hn::Add(codes, offset_[v]);
    } else {
      return codes;
    }
  }
  HWY_INLINE VF Scale(size_t /*sub*/, size_t v) const {
    return hn::LoadU(DF(), scales_ + v * kFloats);
  }

 private:
  HWY_INLINE void LoadGroup() {
    // Scales are a slow stream, which the hardware's prefetchers do not follow.
    constexpr size_t kAheadBytes = 8 * BlockPanels::kPanelCols * sizeof(float);
    PrefetchL2Behind(scales_, kAheadBytes);
    if constexpr (kZeros) {
      PrefetchL2Behind(zeros_, kAheadBytes);
      // 16 - zero in each byte of a column; zeros are stored less 8.
      const DI di;
      HWY_UNROLL(4)
      for (size_t v = 0; v < kVecs; ++v) {
        const auto zero =
            hn::ConvertTo(di, hn::LoadU(DF(), zeros_ + v * kFloats));
        const auto offset = hn::Sub(hn::Set(di, 8), zero);
        offset_[v] =
            hn::BitCast(DB(), hn::Mul(offset, hn::Set(di, 0x01010101)));
      }
    }
  }

  const uint8_t* HWY_RESTRICT lines_;
  const float* HWY_RESTRICT scales_;
  const float* HWY_RESTRICT zeros_;
  size_t group_blocks_;
  size_t left_;  // blocks of this group that are to come
  VB offset_[kZeros ? kVecs : 1];
};

template <bool kZeros, size_t kRows>
void I4Tile(const TileArgs& t) {
  VF sums[kRows][kVecs];
  LoadSums(t, sums);
  I4Record<kZeros> record(t.b, *t.groups);
  const auto* rows = reinterpret_cast<const BlockRow*>(t.a);
  for (size_t b = 0; b < t.steps; ++b) {
    Fetch<1>(t.prefetch[0], b);
    record.Begin();
    AddSubBlocks<I4Arithmetic, 0>(record, b, rows, sums);
  }
  StoreSums(t, sums);
}

template <bool kZeros>
struct FusedI4 : FusedShape {
  template <size_t kRows, size_t /*kPanels*/>
  static constexpr Tile kTile = &I4Tile<kZeros, kRows>;
};

template <bool kZeros>
void DecodeI4(const uint8_t* lines, size_t blocks, const I4Groups& groups,
              DecodedRecord* to) {
  I4Record<kZeros> record(lines, groups);
  for (size_t b = 0; b < blocks; ++b) {
    record.Begin();
    DecodeLines<BlockPanels::kBlockQuads, 0>(record, b, to);
    HWY_UNROLL(4)
    for (size_t v = 0; v < kVecs; ++v) {
      hn::StoreU(record.Scale(b, v), DF(), to->s[b] + v * kFloats);
    }
  }
}

// Moves the codes of a block to where panels have theirs.
HWY_INLINE void ReorderBlock(int8_t* HWY_RESTRICT codes) {
  const hn::FixedTag<int8_t, 16> d;
  alignas(16) constexpr int8_t kPlaces[16] = {
      kI4Order[0],     kI4Order[1],     kI4Order[2],     kI4Order[3],
      kI4Order[4],     kI4Order[5],     kI4Order[6],     kI4Order[7],
      kI4Order[0] + 8, kI4Order[1] + 8, kI4Order[2] + 8, kI4Order[3] + 8,
      kI4Order[4] + 8, kI4Order[5] + 8, kI4Order[6] + 8, kI4Order[7] + 8};
  const auto places = hn::Load(d, kPlaces);
  for (size_t i = 0; i < BlockPanels::kBlockK; i += 16) {
    hn::StoreU(hn::TableLookupBytes(hn::LoadU(d, codes + i), places), d,
               codes + i);
  }
}

// Terms are those of the new order: each half of a term in 16 bits meets the
// products of the same k.
template <typename T>
void PackI4Row(const void* a, size_t k, const BlockTerms& terms, uint32_t* to) {
  constexpr BlockTerms kNoTerms = {BlockPanels::kBlockK, 0, false};
  const T* HWY_RESTRICT x = static_cast<const T*>(a);
  auto* HWY_RESTRICT row = reinterpret_cast<BlockRow*>(to);
  for (size_t b = 0; b < k / BlockPanels::kBlockK; ++b) {
    QuantizeBlock(x + b * BlockPanels::kBlockK, kNoTerms, b, row);
    int8_t* HWY_RESTRICT codes = row->codes + b * BlockPanels::kBlockK;
    ReorderBlock(codes);
    const auto pairs = hn::Add(PairSums(codes), PairSums(codes + 16));
    row->terms[b] = TermOf(pairs, terms, 0.0f);
  }
}

template <bool kZeros>
I4BlockKernels MakeI4Kernels() {
  I4BlockKernels kernels = {};
  kernels.target = KernelTarget();
  kernels.arithmetic = QUERN_HAS_VPDPBUSD ? "int8 dot" : "int8 pairs";
  kernels.terms = TermsOf(BlockTraitsOf(kZeros ? kWithZeros : kPlain));
  kernels.sums = TileSums::kAlike;
  kernels.fused = TableOf(kTilesOf<FusedI4<kZeros>>);
  kernels.decoded = TableOf(kTilesOf<DecodedTiles<I4Arithmetic>>);
  kernels.decode = &DecodeI4<kZeros>;
  return kernels;
}

I4BlockKernels GetKernels(bool zero_points, DType a) {
  I4BlockKernels kernels =
      zero_points ? MakeI4Kernels<true>() : MakeI4Kernels<false>();
  kernels.pack_row =
      WithFloatType(a, [](auto t) { return &PackI4Row<decltype(t)>; });
  return kernels;
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern {
#if QUERN_AVX_VNNI_PASS
I4BlockKernels GetI4BlockAvxVnniKernels(bool zero_points, DType a) {
  return HWY_STATIC_DISPATCH(GetKernels)(zero_points, a);
}
#else
absl::Span<const I4BlockKernelSet> I4BlockKernelSets() {
  static constexpr I4BlockKernelSet kSets[] = {
    QUERN_HWY_SETS_ABOVE_AVX2(GetKernels),
#if QUERN_AVX_VNNI
    {kAvx2Vnni, &GetI4BlockAvxVnniKernels},
#endif
    QUERN_HWY_SETS_FROM_AVX2(GetKernels),
  };
  return kSets;
}
I4BlockKernels GetI4BlockKernels(bool zero_points, DType a) {
  return FirstThatRuns(I4BlockKernelSets()).get(zero_points, a);
}
#endif
}  // namespace quern
#endif  // HWY_ONCE
