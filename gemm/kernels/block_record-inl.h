// Decodes the packed records of packing/block_panels.h in registers, once per
// instruction set.

// clang-format off
#if defined(QUERN_GEMM_KERNELS_BLOCK_RECORD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_GEMM_KERNELS_BLOCK_RECORD_INL_H_
#undef QUERN_GEMM_KERNELS_BLOCK_RECORD_INL_H_
#else
#define QUERN_GEMM_KERNELS_BLOCK_RECORD_INL_H_
#endif
// clang-format on

#include <cstddef>
#include <cstdint>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "quern/core/dtype.h"
#include "quern/core/quad_dot-inl.h"
#include "quern/gemm/kernels/block_dot-inl.h"
#include "quern/gemm/kernels/block_kernels.h"
#include "quern/gemm/kernels/block_tile-inl.h"
#include "quern/gemm/weights/block_traits.h"
#include "quern/packing/block_panels.h"
#include "quern/quant/block_format.h"
#include "quern/quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Bits [kFrom, kFrom + kBits) of every byte, as bits from kTo on.
template <int kBits, int kFrom, int kTo>
HWY_INLINE VB MoveBits(VB v) {
  if constexpr (kBits == 8) {
    return v;
  } else {
    const DB d;
    const hn::Repartition<uint16_t, DB> dw;
    constexpr auto kMask = static_cast<uint8_t>(((1 << kBits) - 1) << kTo);
    // Bits that cross into the neighbouring byte are masked away.
    if constexpr (kFrom > kTo) {
      v = hn::BitCast(d, hn::ShiftRight<kFrom - kTo>(hn::BitCast(dw, v)));
    } else if constexpr (kFrom < kTo) {
      v = hn::BitCast(d, hn::ShiftLeft<kTo - kFrom>(hn::BitCast(dw, v)));
    }
    return hn::And(v, hn::Set(d, kMask));
  }
}

HWY_INLINE VF LoadF16(const uint8_t* HWY_RESTRICT from) {
  const DF df;
  const hn::Rebind<uint16_t, DF> dh;
  return DecodeCodes<Float16>(
      df, hn::LoadU(dh, reinterpret_cast<const uint16_t*>(from)));
}

// One byte for each column.
HWY_INLINE VI LoadS8(const uint8_t* HWY_RESTRICT from) {
  const hn::Rebind<int8_t, DI> d;
  return hn::PromoteTo(DI(),
                       hn::LoadU(d, reinterpret_cast<const int8_t*>(from)));
}
HWY_INLINE VI LoadU8(const uint8_t* HWY_RESTRICT from) {
  const hn::Rebind<uint8_t, DI> d;
  return hn::PromoteTo(DI(), hn::LoadU(d, from));
}

// 2^(e - 128), subnormal for e < 2.
HWY_INLINE VF PowerOf2(VI e) {
  const DI d;
  const auto one = hn::Set(d, 1);
  const auto small = hn::ShiftLeft<21>(hn::Add(e, one));
  const auto normal = hn::ShiftLeft<23>(hn::Sub(e, one));
  return hn::BitCast(DF(),
                     hn::IfThenElse(hn::Lt(e, hn::Set(d, 2)), small, normal));
}

template <BlockFormat kFormat>
class PackedRecord {
 public:
  static constexpr BlockTraits kTraits = BlockTraitsOf(kFormat);
  static constexpr BlockCodes kCodes = kTraits.codes;
  static_assert(kCodes.scales != BlockScales::kNone, "records have scales");

  HWY_INLINE explicit PackedRecord(const uint8_t* HWY_RESTRICT record)
      : record_(record) {
    if constexpr (kCodes.has_head()) {
      HWY_UNROLL(4)
      for (size_t v = 0; v < kVecs; ++v) {
        d_[v] = LoadF16(record + 2 * v * kFloats);
        if constexpr (kTraits.has_mins()) {
          m_[v] = LoadF16(record + 2 * (kCols + v * kFloats));
        }
      }
    }
  }

  template <size_t kQuad>
  HWY_INLINE VB Codes(size_t b, size_t v) const {
    constexpr int kLow = kCodes.low_bits, kHigh = kCodes.high_bits;
    constexpr auto kI = static_cast<int>(kQuad);
    const uint8_t* HWY_RESTRICT block =
        record_ + BlockPanels::BlockAt(kCodes, static_cast<int64_t>(b)) +
        v * kVecBytes;
    auto codes = MoveBits<kLow, kI * kLow % 8, 0>(
        Line(block, BlockPanels::LowLine(kCodes, kI)));
    if constexpr (kHigh > 0) {
      codes = hn::Or(codes, MoveBits<kHigh, kI * kHigh % 8, kLow>(Line(
                                block, BlockPanels::HighLine(kCodes, kI))));
    }
    if constexpr (kTraits.table != BlockTable::kNone) {
      const auto table = hn::LoadDup128(DB(), kTraits.table == BlockTable::kIQ4
                                                  ? kIQ4Bytes.bytes
                                                  : kE2M1Bytes.bytes);
      codes = hn::TableLookupBytes(WithOffset(table), codes);
    } else {
      codes = WithOffset(codes);
    }
    return codes;
  }

  HWY_INLINE VF Scale(size_t sub, size_t v) const {
    const uint8_t* HWY_RESTRICT scales = ScalesOf(sub);
    const size_t at = v * kFloats;
    switch (kCodes.scales) {
      case BlockScales::kF16:
      case BlockScales::kF16AndMin:
        return LoadF16(scales + 2 * at);
      case BlockScales::kE8M0:
        return PowerOf2(LoadU8(scales + at));
      case BlockScales::kBytes:
        return Times(d_[v], LoadS8(scales + at));
      case BlockScales::kBytesAndMins:
        return Times(d_[v], LoadU8(scales + at));
      case BlockScales::kRecordF16:
        return d_[v];
      case BlockScales::kNone:
      case BlockScales::kNibbles:
        break;
    }
    return Times(d_[v], hn::And(LoadU8(scales + at), hn::Set(DI(), 15)));
  }

  HWY_INLINE VF Min(size_t sub, size_t v) const {
    const uint8_t* HWY_RESTRICT scales = ScalesOf(sub);
    const size_t at = v * kFloats;
    if constexpr (kCodes.scales == BlockScales::kF16AndMin) {
      return LoadF16(scales + 2 * (kCols + at));
    } else if constexpr (kCodes.scales == BlockScales::kBytesAndMins) {
      return Times(m_[v], LoadU8(scales + kCols + at));
    } else {
      return Times(m_[v], hn::ShiftRight<4>(LoadU8(scales + at)));
    }
  }

 private:
  static constexpr size_t kCols = BlockPanels::kPanelCols;

  HWY_INLINE const uint8_t* ScalesOf(size_t sub) const {
    return record_ + BlockPanels::ScalesAt(kCodes, static_cast<int64_t>(sub));
  }
  static HWY_INLINE VB Line(const uint8_t* HWY_RESTRICT block, int64_t i) {
    return hn::LoadU(DB(), block + i * BlockPanels::kLineBytes);
  }
  // Values of int8 as the Dot takes them.
  static HWY_INLINE VB WithOffset(VB codes) {
    if constexpr (kTraits.is_int8() && QUERN_HAS_VPDPBUSD) {
      return hn::Xor(codes, hn::Set(DB(), 0x80));
    }
    return codes;
  }
  static HWY_INLINE VF Times(VF d, VI s) {
    return hn::Mul(d, hn::ConvertTo(DF(), s));
  }

  const uint8_t* HWY_RESTRICT record_;
  VF d_[kCodes.has_head() ? kVecs : 1];
  VF m_[kCodes.has_head() ? kVecs : 1];
};

// A source of gemm/kernels/block_tile-inl.h: a packed record's quads as
// operands of the format's Dot.
template <BlockFormat kFormat>
struct OperandsOf {
  template <size_t kStep>
  HWY_INLINE VB Codes(size_t b, size_t v) const {
    if constexpr (kHasWords<kFormat>) {
      return hn::BitCast(
          DB(), WordsOf<kStep % 2>(record.template Codes<kStep / 2>(b, v)));
    } else {
      return record.template Codes<kStep>(b, v);
    }
  }
  HWY_INLINE VF Scale(size_t sub, size_t v) const {
    return record.Scale(sub, v);
  }
  HWY_INLINE VF Min(size_t sub, size_t v) const { return record.Min(sub, v); }

  const PackedRecord<kFormat>& record;
};

// Adds the `blocks` blocks of the packed record at `from`, and fetches `next`
// meanwhile.
template <BlockFormat kFormat, size_t kRows>
HWY_INLINE void AddRecord(const uint8_t* HWY_RESTRICT from, size_t blocks,
                          const uint32_t* HWY_RESTRICT a,
                          const TilePrefetch& next, VF (&sums)[kRows][kVecs]) {
  const PackedRecord<kFormat> record(from);
  const OperandsOf<kFormat> operands = {record};
  const auto* rows = reinterpret_cast<const RowOf<kFormat>*>(a);
  for (size_t b = 0; b < blocks; ++b) {
    Fetch<1>(next, b);
    AddSubBlocks<ArithmeticOf<kFormat>, 0>(operands, b, rows, sums);
  }
}

template <BlockFormat kFormat, size_t kRows>
void FusedTile(const TileArgs& t) {
  VF sums[kRows][kVecs];
  LoadSums(t, sums);
  AddRecord<kFormat>(t.b, t.steps, t.a, t.prefetch[0], sums);
  StoreSums(t, sums);
}

// Fetches into L1 what is read of a row with one record: a panel of long rows
// drives it out of there. Without this a bare loop over Q4_K with k = 4096
// reads 52 to 55 GB/s where DRAM gives 65, with it 57 to 60 (Zen 4, 2026).
template <class Row>
HWY_INLINE void FetchRow(const uint32_t* HWY_RESTRICT row) {
  const auto* HWY_RESTRICT bytes = reinterpret_cast<const uint8_t*>(row);
  HWY_UNROLL(16)
  for (size_t i = 0; i < sizeof(Row); i += BlockPanels::kLineBytes) {
    hwy::Prefetch(bytes + i);
  }
}

template <BlockFormat kFormat>
void OneRow(const PanelArgs& p) {
  constexpr auto kBlocks = static_cast<size_t>(BlockPanels::kRecordBlocks);
  VF sums[1][kVecs];
  HWY_UNROLL(4)
  for (size_t v = 0; v < kVecs; ++v) sums[0][v] = hn::Zero(DF());
  const uint32_t* HWY_RESTRICT a = p.a;
  const uint8_t* HWY_RESTRICT b = p.b;
  const size_t lines = p.record_bytes / BlockPanels::kLineBytes;
  for (size_t left = p.blocks; left > 0;) {
    const size_t blocks = HWY_MIN(left, kBlocks);
    FetchRow<RowOf<kFormat>>(left > blocks ? a + p.a_stride : p.a);
    AddRecord<kFormat>(b, blocks, a, {b + p.ahead_bytes, 0, lines}, sums);
    a += p.a_stride;
    b += p.record_bytes;
    left -= blocks;
  }
  HWY_UNROLL(4)
  for (size_t v = 0; v < kVecs; ++v) {
    hn::StoreU(sums[0][v], DF(), p.sums + v * kFloats);
  }
}

// Rows of the largest fused tile: each format has tiles of its own, so few must
// do. Larger ones spill registers on AVX2, and on SSE4 from three rows on.
constexpr size_t kFusedTileRows = kVecs > 2 || kFewTiles ? 2 : 4;
// Rows up to which a record is decoded anew for every tile. A tile of four rows
// takes 54 ns for a record of Q4_0; to decode it to scratch takes 19, and to
// multiply it there 45 (AVX2: 160, 22 and 169). On SSE4 eight rows by 2048 x
// 2048 take 720 us fused and 568 decoded; two rows 197 and 213. Zen 5, 2026.
constexpr size_t kFusedRows = kVecs == 1 ? 8 : kVecs == 2 ? 12 : 2;

// The tiles of a set that decode in registers: of one panel, and of powers of
// two of rows.
struct FusedShape {
  static constexpr size_t kMostRows = kFusedRows;
  static constexpr bool Has(size_t rows, size_t panels) {
    return panels == 1 && rows <= kFusedTileRows && (rows & (rows - 1)) == 0;
  }
};
template <BlockFormat kFormat>
struct FusedBlocks : FusedShape {
  template <size_t kRows, size_t /*kPanels*/>
  static constexpr Tile kTile = &FusedTile<kFormat, kRows>;
};

// Writes lines [kStep, kBlockSteps) of block b.
template <size_t kBlockSteps, size_t kStep, class Source>
HWY_INLINE void DecodeLines(const Source& source, size_t b,
                            DecodedRecord* HWY_RESTRICT to) {
  if constexpr (kStep < kBlockSteps) {
    uint8_t* HWY_RESTRICT line = to->lines[b * kBlockSteps + kStep];
    HWY_UNROLL(4)
    for (size_t v = 0; v < kVecs; ++v) {
      hn::StoreU(source.template Codes<kStep>(b, v), DB(),
                 line + v * kVecBytes);
    }
    DecodeLines<kBlockSteps, kStep + 1>(source, b, to);
  }
}

template <BlockFormat kFormat>
void DecodeRecord(const uint8_t* from, size_t blocks, DecodedRecord* to) {
  using Record = PackedRecord<kFormat>;
  const Record record(from);
  const OperandsOf<kFormat> operands = {record};
  constexpr size_t kSubs =
      BlockPanels::kBlockK / BlockTraitsOf(kFormat).codes.sub_block;
  for (size_t b = 0; b < blocks; ++b) {
    DecodeLines<DotOf<kFormat>::kBlockSteps, 0>(operands, b, to);
    for (size_t s = b * kSubs; s < (b + 1) * kSubs; ++s) {
      HWY_UNROLL(4)
      for (size_t v = 0; v < kVecs; ++v) {
        hn::StoreU(record.Scale(s, v), DF(), to->s[s] + v * kFloats);
        if constexpr (BlockTraitsOf(kFormat).has_mins()) {
          hn::StoreU(record.Min(s, v), DF(), to->t[s] + v * kFloats);
        }
      }
    }
  }
}

template <BlockFormat kFormat>
BlockKernels MakeBlockKernels() {
  BlockKernels kernels = {};
  kernels.target = KernelTarget();
  kernels.arithmetic = QUERN_HAS_VPDPBUSD   ? "int8 dot"
                       : kHasWords<kFormat> ? "int16 pairs"
                                            : "int8 pairs";
  kernels.row_pitch = sizeof(RowOf<kFormat>) / sizeof(uint32_t);
  kernels.terms = TermsOf(BlockTraitsOf(kFormat));
  kernels.sums = TileSums::kAlike;
  kernels.fused = TableOf(kTilesOf<FusedBlocks<kFormat>>);
  kernels.decoded = TableOf(kTilesOf<DecodedTiles<ArithmeticOf<kFormat>>>);
  kernels.decode = &DecodeRecord<kFormat>;
  // One row of words reads more slowly by it: Q8_0 0.82 in place of 0.92 of
  // DRAM at 65 GB/s (AVX2, Zen 4, 2026).
  if constexpr (!kHasWords<kFormat>) kernels.one_row = &OneRow<kFormat>;
  return kernels;
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
