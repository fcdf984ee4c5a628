// The inner loop of every packed GEMM, once per instruction set:
//
//   sums[r, p * 16 + c] (+)= sum over l < steps of
//                            dot(a[l, r], b[p][l][c]),   r < kRows, p < kPanels
//
// b is kPanels panels of packing/vnni_layout.h; a is rows of steps * Dot::kSub
// 32-bit elements, PackedRowPitch apart. Every sum is one chain over l, so its
// bits do not depend on kRows or kPanels.
//
// register_tile-inl.h has the Dot that says what one line means.

// clang-format off
#if defined(QUERN_GEMM_KERNELS_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_GEMM_KERNELS_TILE_INL_H_
#undef QUERN_GEMM_KERNELS_TILE_INL_H_
#else
#define QUERN_GEMM_KERNELS_TILE_INL_H_
#endif
// clang-format on

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "quern/core/prefetch.h"
#include "quern/core/registers-inl.h"
#include "quern/gemm/kernels/register_tile-inl.h"
#include "quern/gemm/kernels/tile.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

constexpr size_t kLineBytes = 4 * kLineWords;
constexpr size_t kPanelCols = kLineWords;

// Vectors of one line.
constexpr size_t kVecs = kPanelCols / HWY_MAX_LANES_D(LineTag<float>);

// Sums that stay in registers beside a line of b and one element of a: 28 of 32
// vectors, or 12 of 16.
constexpr size_t kSumVecs = kManyRegisters ? 28 : 12;

// Few and small tiles under sanitizers, which check every load: with all of
// them for all instruction sets a file took gcc 12 four minutes.
#if HWY_IS_ASAN || HWY_IS_TSAN || HWY_IS_MSAN
constexpr size_t kMostRows = 3, kMostPanels = 2;
#else
constexpr size_t kMostRows = kSumVecs, kMostPanels = kTilePanels;
#endif

// How many column panels one tile may cover: powers of two. With few rows, more
// panels give enough independent sums to hide the latency of a multiply-add,
// and what is left over is a few smaller tiles.
// With 16 registers, panels beyond the first must leave some to their lines and
// a word: with AVX2, 3 rows of 2 panels took longer than 4 rows of one (1005
// and 900 us for 4096 x 4096 of bf16. Zen 5, 2026).
constexpr bool HasTile(size_t rows, size_t panels) {
  return panels <= kMostPanels && rows * panels * kVecs <= kSumVecs &&
         (kManyRegisters || rows == 1 || panels == 1 ||
          (rows + 1) * panels * kVecs < 16);
}

constexpr size_t MaxRows() {
  // Two panels share each broadcast of a; four vectors to a panel leave room
  // for one only.
  constexpr size_t kMax = kSumVecs / kVecs / (kVecs == 1 ? 2 : 1);
  return kMax < kMostRows ? kMax : kMostRows;
}

// Where the vectors of one step of each panel begin.
template <size_t kStepBytes>
struct PanelLines {
  static constexpr size_t kVecBytes = kStepBytes / kVecs;
  HWY_INLINE const uint8_t* operator()(size_t v) const {
    return line + v / kVecs * panel_bytes + v % kVecs * kVecBytes;
  }
  const uint8_t* HWY_RESTRICT line;  // of the first panel
  size_t panel_bytes;
};

// Like Dot, one of those that multiply f32, with sums that never leave their
// registers. GCC 12 writes sums to the registers of other operands
// (vfmadd132ps), has too few of these for six rows, and keeps a sum on the
// stack: a line of bf16 takes 18.1 cycles, not 12.3, where nothing is fetched
// (AVX2, Zen 4, 2026).
template <class Dot>
struct SumsInPlace : Dot {
  using D = typename Dot::D;
  static HWY_INLINE hn::Vec<D> MulAdd(hn::Vec<D> b, uint32_t word,
                                      hn::Vec<D> sum) {
#if HWY_TARGET == HWY_AVX2 && HWY_COMPILER_GCC_ACTUAL
    const auto a = hn::BitCast(D(), hn::Set(typename Dot::DU(), word));
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum.raw) : "x"(a.raw), "xm"(b.raw));
    return sum;
#else
    return Dot::MulAdd(b, word, sum);
#endif
  }
};

// Like Step, for Dots whose lines meet four words of a row, too. A Dot may have
// an overload of its own.
template <class Dot, class Line, size_t kRows, size_t kTileVecs>
HWY_INLINE void TileStep(Dot /*dot*/, const uint32_t* HWY_RESTRICT words,
                         size_t stride, const Line& line,
                         hn::Vec<typename Dot::D> (&sums)[kRows][kTileVecs]) {
  if constexpr (Dot::kSub == 4) {
    HalfStep<Dot, 0, /*kTail=*/false>(words, stride, line, 0, sums);
    HalfStep<Dot, 1, /*kTail=*/false>(words + 1, stride, line, 0, sums);
    HalfStep<Dot, 2, /*kTail=*/false>(words + 2, stride, line, 0, sums);
    HalfStep<Dot, 3, /*kTail=*/false>(words + 3, stride, line, 0, sums);
  } else {
    Step<Dot, /*kTail=*/false>(words, stride, line, 0, sums);
  }
}

// The sums of a vector in the order of their columns, for a Dot that has them
// in another one. Such a Dot has an overload of its own.
template <class Dot, class V>
HWY_INLINE V InColumns(Dot /*dot*/, V sums) {
  return sums;
}

// kStepBytes: of b, in each panel.
template <class Dot, size_t kRows, size_t kPanels,
          size_t kStepBytes = kLineBytes>
void MultiplyTile(const TileArgs& t) {
  using D = typename Dot::D;
  using T = hn::TFromD<D>;
  const D d;
  constexpr size_t kLanes = HWY_MAX_LANES_D(D);
  // Two words of a row for each pair, four for each two pairs.
  constexpr size_t kPitch = PackedRowPitch(HWY_MIN(Dot::kSub, 2));
  using Lines = PanelLines<kStepBytes>;
  const uint32_t* HWY_RESTRICT a = t.a;
  const uint8_t* HWY_RESTRICT b = t.b;
  const size_t panel_bytes = t.panel_bytes;

  hn::Vec<D> sum[kRows][kPanels * kVecs];
  ClearSums<D>(sum);
  // Prefetches go to L2, because the next block is as large as L1.
  size_t l = 0;
  for (const TilePrefetch& prefetch : t.prefetch) {
    const uint8_t* HWY_RESTRICT next = prefetch.from;
    const size_t stream_bytes = prefetch.stream_bytes;
    for (size_t i = 0; i < prefetch.lines; ++i) {
      HWY_UNROLL(8)
      for (size_t p = 0; p < kPanels; ++p) PrefetchL2(next + p * stream_bytes);
      next += kLineBytes;
      const size_t end = l + t.prefetch_steps;
      do {
        TileStep(Dot(), a + l * Dot::kSub, kPitch,
                 Lines{b + l * kStepBytes, panel_bytes}, sum);
      } while (++l < end);
    }
  }
  for (; l < t.steps; ++l) {
    TileStep(Dot(), a + l * Dot::kSub, kPitch,
             Lines{b + l * kStepBytes, panel_bytes}, sum);
  }
  HWY_UNROLL(16)
  for (size_t r = 0; r < kRows; ++r) {
    T* HWY_RESTRICT to = static_cast<T*>(t.sums) + r * t.sums_stride;
    HWY_UNROLL(8)
    for (size_t v = 0; v < kPanels * kVecs; ++v) {
      T* HWY_RESTRICT at = to + v * kLanes;
      const auto old = t.add ? hn::LoadU(d, at) : hn::Zero(d);
      hn::StoreU(hn::Add(old, InColumns(Dot(), sum[r][v])), d, at);
    }
  }
}

template <class D>
void AddChunks(const AddChunksArgs& args) {
  const D d;
  constexpr size_t kLanes = HWY_MAX_LANES_D(D);
  auto* sums = static_cast<hn::TFromD<D>*>(args.sums);
  for (size_t r = 0; r < args.rows; ++r) {
    for (size_t i = 0; i < args.cols; i += kPanelCols) {
      hn::Vec<D> sum[kVecs];
      HWY_UNROLL(4)
      for (size_t v = 0; v < kVecs; ++v) {
        sum[v] = hn::LoadU(d, sums + i + v * kLanes);
      }
      for (size_t c = 1; c < args.chunks; ++c) {
        const auto* from = sums + c * args.chunk_stride + i;
        HWY_UNROLL(4)
        for (size_t v = 0; v < kVecs; ++v) {
          sum[v] = hn::Add(sum[v], hn::LoadU(d, from + v * kLanes));
        }
      }
      HWY_UNROLL(4)
      for (size_t v = 0; v < kVecs; ++v) {
        hn::StoreU(sum[v], d, sums + i + v * kLanes);
      }
    }
    sums += args.sums_stride;
  }
}

// Rows up to which a tile of one panel keeps up with memory that is read in one
// stream. Where a vector is less than a line, a panel of f32 sums does not.
template <class Dot>
constexpr size_t OneStreamRows() {
  if (kVecs == 1) return 2;
  return hwy::IsSame<hn::TFromD<typename Dot::D>, int32_t>() ? 1 : 0;
}

template <class Dot, size_t kStepBytes>
struct DotTiles {
  static constexpr size_t kMostRows = MaxRows();
  static constexpr bool Has(size_t rows, size_t panels) {
    return HasTile(rows, panels);
  }
  template <size_t kRows, size_t kPanels>
  static constexpr Tile kTile = &MultiplyTile<Dot, kRows, kPanels, kStepBytes>;
};

template <class Dot, size_t kStepBytes>
constexpr auto MakeDotTiles() {
  auto tiles = MakeTiles<DotTiles<Dot, kStepBytes>>();
  for (size_t rows = 1; rows <= MaxRows(); ++rows) {
    tiles.panels_in_one_stream[rows] =
        rows <= OneStreamRows<Dot>() ? 1 : tiles.panels[rows];
  }
  return tiles;
}
template <class Dot, size_t kStepBytes>
constexpr auto kDotTiles = MakeDotTiles<Dot, kStepBytes>();

template <class Dot, size_t kStepBytes = kLineBytes>
TileTable MakeTileTable() {
  TileTable table = TableOf(kDotTiles<Dot, kStepBytes>);
  table.few_rows = kVecs == 1 ? 5 : 1;
  table.panels_in_one_stream = kDotTiles<Dot, kStepBytes>.panels_in_one_stream;
  table.add_chunks = &AddChunks<typename Dot::D>;
  return table;
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
