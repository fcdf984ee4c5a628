// fp8 (e4m3) by rows of f32 where bf16 has no dot product: codes become f16 in
// nine instructions for 32 codes, and are converted to f32 as they are loaded
// again. (As bf16 they take 19, and widening them another 8.)
//
// As an f16, a code whose bits are moved to the right places is 2^-8 of what it
// means, denormals too: only the NaN differs. Products and sums are therefore
// 2^-8 of what they mean, which CodesKernels::unit undoes.
//
//   line[v][i % 2][i / 2][c] = code[k = i, 8 v + c],   i < 4, c < 8: 128 bytes

// clang-format off
#if defined(QUERN_GEMM_KERNELS_E4M3_HALVES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_GEMM_KERNELS_E4M3_HALVES_INL_H_
#undef QUERN_GEMM_KERNELS_E4M3_HALVES_INL_H_
#else
#define QUERN_GEMM_KERNELS_E4M3_HALVES_INL_H_
#endif
// clang-format on

#include <cstddef>
#include <cstdint>
#include <limits>

#include "hwy/highway.h"
#include "quern/core/prefetch.h"
#include "quern/gemm/kernels/register_tile-inl.h"
#include "quern/gemm/kernels/tile-inl.h"

#undef QUERN_E4M3_HALVES
#if HWY_TARGET == HWY_AVX2
#define QUERN_E4M3_HALVES 1
#else
#define QUERN_E4M3_HALVES 0
#endif

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

#if QUERN_E4M3_HALVES

constexpr size_t kHalvesBytes = 128;

struct DotE4M3Halves : SumsInPlace<FmaSums> {
  static constexpr size_t kSub = 4;
  static constexpr float kUnit = 256;
  template <size_t kI>
  static HWY_INLINE hn::Vec<D> LoadB(const uint8_t* HWY_RESTRICT line) {
    const hn::Rebind<hwy::float16_t, D> dh;
    const auto* at = reinterpret_cast<const hwy::float16_t*>(
        line + kI % 2 * 32 + kI / 2 * 16);
    return hn::PromoteTo(D(), hn::LoadU(dh, at));
  }
};

using CodeBytes = hn::CappedTag<uint8_t, 32>;

// Turns a vector of codes into one of halves; `most` becomes the largest of
// twice the magnitudes of all codes so far.
HWY_INLINE void StoreHalves(const uint8_t* HWY_RESTRICT codes,
                            uint8_t* HWY_RESTRICT to,
                            hn::Vec<CodeBytes>& most) {
  const CodeBytes d;
  const hn::Repartition<uint16_t, CodeBytes> dw;
  const hn::Repartition<int16_t, CodeBytes> di;
  const auto v = hn::LoadU(d, codes);
  most = hn::Max(most, hn::Add(v, v));
  const auto words = hn::BitCast(dw, v);
  // Four columns of two k in each half become eight columns of one k in each.
  const auto store = [&](auto upper, size_t at) HWY_ATTR {
    const auto f16 =
        hn::And(hn::BitCast(dw, hn::ShiftRight<1>(hn::BitCast(di, upper))),
                hn::Set(dw, uint16_t{0xBF80}));
    hn::StoreU(hn::VFromD<decltype(dw)>{_mm256_permute4x64_epi64(
                   f16.raw, _MM_SHUFFLE(3, 1, 2, 0))},
               dw, reinterpret_cast<uint16_t*>(to + at));
  };
  store(hn::ShiftLeft<8>(words), 0);
  store(words, 32);
}

HWY_INLINE bool HasNaN(hn::Vec<CodeBytes> most) {
  const CodeBytes d;
  return !hn::AllFalse(d, hn::Eq(most, hn::Set(d, 0xFE)));
}

// The column and the k of byte i of a line of codes: four columns of four k are
// 16 bytes, in which pairs lie side by side.
constexpr size_t ColumnOf(size_t i) { return i / 16 * 4 + i % 8 / 2; }
constexpr size_t KOf(size_t i) { return i % 16 / 8 * 2 + i % 2; }

// Overwrites the f16 of every NaN among the codes.
HWY_NOINLINE void StoreNaNs(const uint8_t* codes, size_t lines, uint8_t* to) {
  constexpr uint16_t kNaN = 0x7E00;
  for (size_t l = 0; l < lines; ++l) {
    for (size_t i = 0; i < kLineBytes; ++i) {
      if ((codes[l * kLineBytes + i] & 0x7F) != 0x7F) continue;
      const size_t col = ColumnOf(i), k = KOf(i);
      hwy::CopyBytes<2>(&kNaN, to + l * kHalvesBytes + col / 8 * 64 +
                                   k % 2 * 32 + k / 2 * 16 + col % 8 * 2);
    }
  }
}

void DecodeE4M3Halves(const uint8_t* HWY_RESTRICT codes, size_t lines,
                      uint8_t* HWY_RESTRICT to) {
  auto most = hn::Zero(CodeBytes());
  const size_t block_bytes = lines * kLineBytes;
  for (size_t b = 0; b < block_bytes; b += kLineBytes) {
    // The panel's next block, which is wanted after some other panels' blocks.
    PrefetchL2Behind(codes + b, block_bytes);
    StoreHalves(codes + b, to + 2 * b, most);
    StoreHalves(codes + b + 32, to + 2 * b + 64, most);
  }
  if (HWY_UNLIKELY(HasNaN(most))) StoreNaNs(codes, lines, to);
}

// Makes the sums of every column that has a NaN among its codes NaN.
template <size_t kRows, size_t kPanels>
HWY_NOINLINE void MarkNaNs(const TileArgs& t) {
  for (size_t p = 0; p < kPanels; ++p) {
    const uint8_t* codes = t.b + p * t.panel_bytes;
    for (size_t i = 0; i < t.steps * kLineBytes; ++i) {
      if ((codes[i] & 0x7F) != 0x7F) continue;
      for (size_t r = 0; r < kRows; ++r) {
        static_cast<float*>(t.sums)[r * t.sums_stride + p * kPanelCols +
                                    ColumnOf(i % kLineBytes)] =
            std::numeric_limits<float>::quiet_NaN();
      }
    }
  }
}

// Tiles of few rows, which turn a few lines of each panel into halves and
// multiply them while the next are decoded.
template <size_t kRows, size_t kPanels>
struct E4M3Tile {
  using D = DotE4M3Halves::D;
  using Sums = hn::Vec<D>[kRows][kPanels * kVecs];
  // Few enough for the CPU to overlap a block with the one before it. One row
  // of four panels, cycles a line: 14.4 with blocks of 1 line, 11.6 with 2 and
  // 4, 11.8 with 8; where a piece of 32 lines was decoded first, 14.4 (Zen 4,
  // AVX2, 2026).
  static constexpr size_t kBlock = 4;

  template <size_t kLines>
  static HWY_INLINE void Multiply(const uint32_t* HWY_RESTRICT a,
                                  const uint8_t* HWY_RESTRICT b,
                                  size_t panel_bytes, Sums& sums,
                                  hn::Vec<CodeBytes>& most) {
    alignas(32) uint8_t halves[kPanels][kLines * kHalvesBytes];
    HWY_UNROLL(4)
    for (size_t p = 0; p < kPanels; ++p) {
      const uint8_t* HWY_RESTRICT codes = b + p * panel_bytes;
      HWY_UNROLL(4)
      for (size_t i = 0; i < kLines; ++i) {
        uint8_t* HWY_RESTRICT to = halves[p] + i * kHalvesBytes;
        StoreHalves(codes + i * kLineBytes, to, most);
        StoreHalves(codes + i * kLineBytes + 32, to + 64, most);
      }
    }
#if HWY_COMPILER_GCC || HWY_COMPILER_CLANG
    // Compilers must not see that what is loaded was just stored: they would
    // convert registers, which is two micro-operations and not one.
    asm volatile("" : : : "memory");
#endif
    HWY_UNROLL(4)
    for (size_t i = 0; i < kLines; ++i) {
      TileStep(DotE4M3Halves(), a + i * DotE4M3Halves::kSub, PackedRowPitch(2),
               PanelLines<kHalvesBytes>{halves[0] + i * kHalvesBytes,
                                        sizeof(halves[0])},
               sums);
    }
  }

  static void Run(const TileArgs& t) {
    const D d;
    constexpr size_t kLanes = HWY_MAX_LANES_D(D);
    const uint32_t* HWY_RESTRICT a = t.a;
    const uint8_t* HWY_RESTRICT b = t.b;
    const size_t panel_bytes = t.panel_bytes;
    const uint8_t* HWY_RESTRICT next = t.prefetch[0].from;
    const size_t stream_bytes = t.prefetch[0].stream_bytes;
    const size_t fetched = t.prefetch[0].lines;
    Sums sums;
    ClearSums<D>(sums);
    auto most = hn::Zero(CodeBytes());
    size_t l = 0;
    for (; l + kBlock <= t.steps; l += kBlock) {
      if (l < fetched) {
        HWY_UNROLL(4)
        for (size_t p = 0; p < kPanels; ++p) {
          HWY_UNROLL(4)
          for (size_t i = 0; i < kBlock; ++i) {
            PrefetchL2(next + p * stream_bytes + i * kLineBytes);
          }
        }
        next += kBlock * kLineBytes;
      }
      Multiply<kBlock>(a, b, panel_bytes, sums, most);
      a += kBlock * DotE4M3Halves::kSub;
      b += kBlock * kLineBytes;
    }
    for (; l < t.steps; ++l) {
      Multiply<1>(a, b, panel_bytes, sums, most);
      a += DotE4M3Halves::kSub;
      b += kLineBytes;
    }
    HWY_UNROLL(8)
    for (size_t r = 0; r < kRows; ++r) {
      float* HWY_RESTRICT to = static_cast<float*>(t.sums) + r * t.sums_stride;
      HWY_UNROLL(8)
      for (size_t v = 0; v < kPanels * kVecs; ++v) {
        // MultiplyTile adds its sums to zero, which turns -0 into 0.
        hn::StoreU(hn::Add(hn::Zero(d), sums[r][v]), d, to + v * kLanes);
      }
    }
    if (HWY_UNLIKELY(HasNaN(most))) MarkNaNs<kRows, kPanels>(t);
  }
};

struct E4M3Tiles {
  static constexpr size_t kMostRows = MaxRows();
  static constexpr bool Has(size_t rows, size_t panels) {
    return HasTile(rows, panels);
  }
  template <size_t kRows, size_t kPanels>
  static constexpr Tile kTile = &E4M3Tile<kRows, kPanels>::Run;
};

#endif  // QUERN_E4M3_HALVES

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
