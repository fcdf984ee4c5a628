#include <cstddef>
#include <cstdint>

#include "quern/core/dtype.h"
#include "quern/core/float_type.h"
#include "quern/core/sets/avx3_zen4.h"
#include "quern/gemm/kernels/codes_kernels.h"

// Compiled once per instruction set: foreach_target.h re-includes this file.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gemm/kernels/codes_simd.cc"
// foreach_target.h comes first, whatever the alphabet says.
// clang-format off
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "quern/core/prefetch.h"
#include "quern/gemm/kernels/e4m3_halves-inl.h"
#include "quern/quant/convert-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

constexpr size_t kLine = 64;

// Whether a vector is a line, and tables of as many bytes and a bf16 dot
// product are there: then tiles decode in registers.
#undef QUERN_CODES_IN_REGISTERS
#if HWY_ARCH_X86 && HWY_NATIVE_DOT_BF16
#define QUERN_CODES_IN_REGISTERS 1
#else
#define QUERN_CODES_IN_REGISTERS 0
#endif

// Vectors of at most one line.
#if HWY_HAVE_SCALABLE
using DF = hn::FixedTag<float, 4>;
#else
using DF = hn::CappedTag<float, 16>;
#endif
using DB = hn::Repartition<uint8_t, DF>;
using DW = hn::Repartition<uint16_t, DF>;
using DU = hn::Repartition<uint32_t, DF>;
using DI = hn::Repartition<int32_t, DF>;
using VB = hn::Vec<DB>;
using VW = hn::Vec<DW>;
constexpr size_t kFloats = HWY_MAX_LANES_D(DF);
constexpr size_t kBytes = 4 * kFloats;

// Decoders: Decode(v, lines) turns the bytes v of a line into the same columns
// of kLines lines of pairs of bf16.

struct E4M3 {
  static constexpr size_t kLines = 2;
  static HWY_INLINE void Decode(VB v, VW (&lines)[kLines]) {
    const DB d;
    const auto abs = hn::And(v, hn::Set(d, 0x7F));
    const auto sign = hn::And(v, hn::Set(d, 0x80));
#if QUERN_CODES_IN_REGISTERS
    // All 128 magnitudes in two registers each: half the instructions of what
    // follows (Zen 4, 2026).
    const auto index = hn::IndicesFromVec(d, abs);
    const auto lower =
        hn::TwoTablesLookupLanes(d, hn::Load(d, kE4M3Tables.lower),
                                 hn::Load(d, kE4M3Tables.lower + 64), index);
    const auto upper = hn::Or(
        sign,
        hn::TwoTablesLookupLanes(d, hn::Load(d, kE4M3Tables.upper),
                                 hn::Load(d, kE4M3Tables.upper + 64), index));
#else
    // Normal numbers by arithmetic, the first eight from the table.
    const auto small = hn::Eq(hn::And(v, hn::Set(d, 0x78)), hn::Zero(d));
    const auto nan = hn::Eq(abs, hn::Set(d, 0x7F));
    const auto lower = hn::IfThenElse(
        small, hn::TableLookupBytes(hn::LoadDup128(d, kE4M3Tables.lower), abs),
        hn::ShiftLeft<4>(v));
    const auto magnitude = hn::IfThenElse(
        small, hn::TableLookupBytes(hn::LoadDup128(d, kE4M3Tables.upper), abs),
        hn::Add(hn::ShiftRight<4>(abs), hn::Set(d, 0x3C)));
    const auto upper = hn::Or(
        magnitude, hn::Or(sign, hn::IfThenElseZero(nan, hn::Set(d, 0x3C))));
#endif
    lines[0] = hn::BitCast(DW(), hn::InterleaveLower(d, lower, upper));
    lines[1] = hn::BitCast(DW(), hn::InterleaveUpper(d, lower, upper));
  }
};

struct I8 {
  static constexpr size_t kLines = 2;
  // Each lane: two i8 in the upper bytes of its halves.
  static HWY_INLINE VW Pairs(VB v) {
    const auto x = hn::BitCast(DI(), v);
    const auto even = hn::ShiftRight<24>(hn::ShiftLeft<16>(x));
    const auto odd = hn::ShiftRight<24>(x);
    const auto low = hn::BitCast(DU(), hn::ConvertTo(DF(), even));
    const auto high = hn::BitCast(DU(), hn::ConvertTo(DF(), odd));
    return hn::BitCast(DW(), hn::Or(hn::ShiftRight<16>(low), high));
  }
  static HWY_INLINE void Decode(VB v, VW (&lines)[kLines]) {
    const DB d;
    lines[0] = Pairs(hn::InterleaveLower(d, hn::Zero(d), v));
    lines[1] = Pairs(hn::InterleaveUpper(d, hn::Zero(d), v));
  }
};

struct I4 {
  static constexpr size_t kLines = 4;
#if QUERN_CODES_IN_REGISTERS
  // Looks up the lowest five bits of each index. Highway's own function refuses
  // indices with other bits in debug builds.
  static HWY_INLINE VW Lookup(VW index) {
    return VW{_mm512_permutexvar_epi16(index.raw,
                                       hn::Load(DW(), kI4Tables.words).raw)};
  }
  static HWY_INLINE void Decode(VB v, VW (&lines)[kLines]) {
    const auto words = hn::BitCast(DW(), v);
    lines[0] = Lookup(words);
    lines[1] = Lookup(hn::ShiftRight<4>(words));
    lines[2] = Lookup(hn::ShiftRight<8>(words));
    lines[3] = Lookup(hn::ShiftRight<12>(words));
  }
#else
  static HWY_INLINE void Decode(VB v, VW (&lines)[kLines]) {
    const DB d;
    const DW dw;
    const auto upper_bytes = hn::LoadDup128(d, kI4Tables.upper);
    const auto lower_bytes = hn::LoadDup128(d, kI4Tables.lower);
    const auto low_half = hn::Set(dw, 0x00FF);
    HWY_UNROLL(2)
    for (size_t i = 0; i < 2; ++i) {
      const auto index =
          i == 0 ? hn::And(v, hn::Set(d, 0x0F)) : hn::ShiftRight<4>(v);
      const auto upper =
          hn::BitCast(dw, hn::TableLookupBytes(upper_bytes, index));
      const auto lower =
          hn::BitCast(dw, hn::TableLookupBytes(lower_bytes, index));
      lines[i] = hn::Or(hn::And(lower, low_half), hn::ShiftLeft<8>(upper));
      lines[i + 2] =
          hn::Or(hn::ShiftRight<8>(lower), hn::AndNot(low_half, upper));
    }
  }
#endif
};

template <class Codes>
void DecodeLines(const uint8_t* HWY_RESTRICT codes, size_t lines,
                 uint8_t* HWY_RESTRICT to) {
  const size_t block_bytes = lines * kLine;
  for (size_t l = 0; l < lines; ++l) {
    // The panel's next block, which is wanted after some other panels' blocks.
    PrefetchL2Behind(codes, block_bytes);
    for (size_t b = 0; b < kLine; b += kBytes) {
      VW out[Codes::kLines];
      Codes::Decode(hn::LoadU(DB(), codes + b), out);
      HWY_UNROLL(4)
      for (size_t i = 0; i < Codes::kLines; ++i) {
        hn::StoreU(hn::BitCast(DB(), out[i]), DB(), to + i * kLine + b);
      }
    }
    codes += kLine;
    to += Codes::kLines * kLine;
  }
}

void Scale(const ScaleArgs& args) {
  const DF d;
  constexpr size_t kCols = 16;
  // The scales of a panel are a slow stream, one line for many lines of codes,
  // which the hardware's prefetchers do not follow: int4 with one row took 1.1
  // times as long without (Zen 5, 2026).
  constexpr size_t kAheadBytes = 4 * kCols * sizeof(float);
  for (size_t p = 0; p < args.panels; ++p) {
    PrefetchL2Behind(args.scales + p * args.panel_stride, kAheadBytes);
    if (args.zeros != nullptr) {
      PrefetchL2Behind(args.zeros + p * args.panel_stride, kAheadBytes);
    }
  }
  const float* HWY_RESTRICT sums = args.sums;
  const auto unit = hn::Set(d, args.unit);
  for (size_t r = 0; r < args.rows; ++r) {
    const auto row_sum = hn::Set(
        d,
        args.zeros == nullptr ? 0.0f : args.row_sums[r * args.row_sums_stride]);
    float* HWY_RESTRICT to = args.to + r * args.to_stride;
    for (size_t p = 0; p < args.panels; ++p) {
      const size_t at = p * args.panel_stride;
      for (size_t c = 0; c < kCols; c += kFloats) {
        auto sum = hn::Mul(hn::LoadU(d, sums + c), unit);
        if (args.zeros != nullptr) {
          sum = hn::NegMulAdd(hn::LoadU(d, args.zeros + at + c), row_sum, sum);
        }
        const auto old = args.add ? hn::LoadU(d, to + c) : hn::Zero(d);
        hn::StoreU(hn::MulAdd(hn::LoadU(d, args.scales + at + c), sum, old), d,
                   to + c);
      }
      sums += kCols;
      to += kCols;
    }
  }
}

template <typename T>
float Sum(const void* a, size_t k) {
  const DF d;
  const T* HWY_RESTRICT from = static_cast<const T*>(a);
  auto sum = hn::Zero(d);
  size_t i = 0;
  for (; i + kFloats <= k; i += kFloats) {
    sum = hn::Add(sum, LoadF32(d, from + i));
  }
  if (i < k) sum = hn::Add(sum, LoadNF32(d, from + i, k - i));
  return hn::ReduceSum(d, sum);
}

#if QUERN_CODES_IN_REGISTERS
// Decodes a line of each panel, and multiplies it at once.
template <class Codes, size_t kRows, size_t kPanels>
HWY_INLINE void FusedStep(const uint32_t* HWY_RESTRICT a,
                          const uint8_t* HWY_RESTRICT b, size_t panel_bytes,
                          hn::Vec<DF> (&sum)[kRows][kPanels]) {
  const DF d;
  using DP = hn::Repartition<hwy::bfloat16_t, DF>;
  HWY_UNROLL(8)
  for (size_t p = 0; p < kPanels; ++p) {
    VW lines[Codes::kLines];
    Codes::Decode(hn::LoadU(DB(), b + p * panel_bytes), lines);
    HWY_UNROLL(4)
    for (size_t i = 0; i < Codes::kLines; ++i) {
      HWY_UNROLL(16)
      for (size_t r = 0; r < kRows; ++r) {
        const auto pair = hn::Set(DU(), a[r * PackedRowPitch(1) + i]);
        auto unused = hn::Zero(d);  // native: all goes to the first sum
        sum[r][p] = hn::ReorderWidenMulAccumulate(d, hn::BitCast(DP(), pair),
                                                  hn::BitCast(DP(), lines[i]),
                                                  sum[r][p], unused);
      }
    }
  }
}

template <class Codes, size_t kRows, size_t kPanels>
void FusedTile(const TileArgs& t) {
  const DF d;
  const uint32_t* HWY_RESTRICT a = t.a;
  const uint8_t* HWY_RESTRICT b = t.b;
  const uint8_t* HWY_RESTRICT next = t.prefetch[0].from;
  const size_t stream_bytes = t.prefetch[0].stream_bytes;
  const size_t panel_bytes = t.panel_bytes;
  hn::Vec<DF> sum[kRows][kPanels];
  HWY_UNROLL(16)
  for (size_t r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (size_t p = 0; p < kPanels; ++p) sum[r][p] = hn::Zero(d);
  }
  size_t l = 0;
  for (; l < t.prefetch[0].lines; ++l) {
    HWY_UNROLL(8)
    for (size_t p = 0; p < kPanels; ++p) {
      PrefetchL2(next + l * kLine + p * stream_bytes);
    }
    FusedStep<Codes, kRows, kPanels>(a + l * Codes::kLines, b + l * kLine,
                                     panel_bytes, sum);
  }
  for (; l < t.steps; ++l) {
    FusedStep<Codes, kRows, kPanels>(a + l * Codes::kLines, b + l * kLine,
                                     panel_bytes, sum);
  }
  float* HWY_RESTRICT to = static_cast<float*>(t.sums);
  HWY_UNROLL(16)
  for (size_t r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (size_t p = 0; p < kPanels; ++p) {
      hn::StoreU(sum[r][p], d, to + r * t.sums_stride + p * 16);
    }
  }
}

// Sums that leave registers to the decoder. int8 decodes in so many
// instructions that many rows had better share them. Few tiles under
// sanitizers, as in gemm/kernels/tile-inl.h.
template <class Codes>
struct FusedTiles {
  static constexpr bool kFew = HWY_IS_ASAN || HWY_IS_TSAN || HWY_IS_MSAN;
  static constexpr size_t kMostRows =
      kFew ? 3 : (hwy::IsSame<Codes, I8>() ? 4 : 8);
  static constexpr bool Has(size_t rows, size_t panels) {
    return rows * panels <= 24;
  }
  template <size_t kRows, size_t kPanels>
  static constexpr Tile kTile = &FusedTile<Codes, kRows, kPanels>;
};
#endif  // QUERN_CODES_IN_REGISTERS

template <class Codes>
void FillKernels(CodesKernels& kernels) {
  kernels.decode = &DecodeLines<Codes>;
  kernels.decoded_k = 2;
  kernels.unit = 1;
#if QUERN_CODES_IN_REGISTERS
  static_assert(kBytes == kLine, "a vector is a line");
  kernels.fused = TableOf(kTilesOf<FusedTiles<Codes>>);
  kernels.fused_elements = 1;
  // More than two tiles' rows: 4096 x 4096, 256 rows of bf16 by int4 take 24 ms
  // from scratch and 39 ms in tiles of 14 rows (Zen 4, 2026).
  kernels.fused_most_rows = 2 * kernels.fused.max_rows;
#elif QUERN_E4M3_HALVES
  if constexpr (hwy::IsSame<Codes, E4M3>()) {
    kernels.decode = &DecodeE4M3Halves;
    kernels.decoded = MakeTileTable<DotE4M3Halves, kHalvesBytes>();
    kernels.decoded_k = DotE4M3Halves::kSub;
    kernels.unit = DotE4M3Halves::kUnit;
    kernels.fused = TableOf(kTilesOf<E4M3Tiles>);
    kernels.fused_elements = 2;
    kernels.fused_most_rows = kernels.fused.max_rows;
  }
#endif
}

CodesKernels GetKernels(CodeType codes, DType a) {
  CodesKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.sums = TileSums::kAlike;
  switch (codes) {
    case CodeType::kE4M3:
      FillKernels<E4M3>(kernels);
      break;
    case CodeType::kI8:
      FillKernels<I8>(kernels);
      break;
    case CodeType::kI4:
      FillKernels<I4>(kernels);
      break;
  }
  kernels.scale = &Scale;
  kernels.sum = WithFloatType(a, [](auto t) { return &Sum<decltype(t)>; });
  return kernels;
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern {
absl::Span<const CodesKernelSet> CodesKernelSets() {
  static constexpr CodesKernelSet kSets[] = {QUERN_HWY_SETS(GetKernels)};
  return kSets;
}
CodesKernels GetCodesKernels(CodeType codes, DType a) {
  return FirstThatRuns(CodesKernelSets()).get(codes, a);
}
}  // namespace quern
#endif  // HWY_ONCE
