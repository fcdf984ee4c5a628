// The kernels of gemm/kernels/exact_block_kernels.h, once per instruction set.
// The decoder is the one of int8 products, PackedRecord; what it returns for a
// code becomes f32 here.

// clang-format off
#if defined(QUERN_GEMM_KERNELS_EXACT_BLOCK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_GEMM_KERNELS_EXACT_BLOCK_INL_H_
#undef QUERN_GEMM_KERNELS_EXACT_BLOCK_INL_H_
#else
#define QUERN_GEMM_KERNELS_EXACT_BLOCK_INL_H_
#endif
// clang-format on

#include <cstddef>
#include <cstdint>
#include <utility>

#include "hwy/highway.h"
#include "quern/gemm/kernels/block_dot-inl.h"
#include "quern/gemm/kernels/block_record-inl.h"
#include "quern/gemm/kernels/block_tile-inl.h"
#include "quern/gemm/kernels/exact_block_kernels.h"
#include "quern/gemm/kernels/register_tile-inl.h"
#include "quern/gemm/kernels/tile.h"
#include "quern/gemm/weights/block_traits.h"
#include "quern/packing/block_panels.h"
#include "quern/quant/block_format.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// The four integers value(u) - zero of a quad's codes, as bytes.
template <BlockFormat kFormat, size_t kQuad>
HWY_INLINE VI QuadValues(const PackedRecord<kFormat>& record, size_t b,
                         size_t v) {
  // The format's zero, or 128 where PackedRecord adds that to int8.
  constexpr int kZero = TermsOf(BlockTraitsOf(kFormat)).zero;
  auto codes = record.template Codes<kQuad>(b, v);
  if constexpr (kZero != 0) {
    codes = hn::Sub(codes, hn::Set(DB(), static_cast<uint8_t>(kZero)));
  }
  return hn::BitCast(DI(), codes);
}

// s * value - t of byte kByte of each quad. The product is exact, so that this
// has one rounding with or without a fused multiply-add.
template <bool kMins, int kByte>
HWY_INLINE VF WeightOf(VI quad, VF s, VF t) {
  if constexpr (kByte < 3) quad = hn::ShiftLeft<24 - 8 * kByte>(quad);
  const auto value = hn::ConvertTo(DF(), hn::ShiftRight<24>(quad));
  if constexpr (kMins) {
    return hn::MulSub(s, value, t);
  } else {
    (void)t;
    return hn::Mul(s, value);
  }
}

// Gives `sink` the weights of one k: those of kWidth vectors of columns.
template <bool kMins, int kByte, size_t kWidth, class Sink>
HWY_INLINE void TakeByte(const VI (&quads)[kWidth], const VF (&s)[kWidth],
                         const VF (&t)[kWidth], size_t k, Sink& sink) {
  VF w[kWidth];
  HWY_UNROLL(8)
  for (size_t v = 0; v < kWidth; ++v) {
    w[v] = WeightOf<kMins, kByte>(quads[v], s[v], t[v]);
  }
  sink.Take(k, w);
}

// Gives `sink` the weights of block b from quad kQuad on, in the order of k. s
// and t are the scales and minima of the quad before.
template <BlockFormat kFormat, size_t kQuad, size_t kPanels, class Sink>
HWY_INLINE void TakeQuads(const PackedRecord<kFormat> (&records)[kPanels],
                          size_t b, VF (&s)[kPanels * kVecs],
                          VF (&t)[kPanels * kVecs], Sink& sink) {
  if constexpr (kQuad < BlockPanels::kBlockQuads) {
    constexpr BlockTraits kTraits = BlockTraitsOf(kFormat);
    constexpr size_t kSubQuads = kTraits.codes.sub_block / 4;
    constexpr size_t kWidth = kPanels * kVecs;
    if constexpr (kQuad % kSubQuads == 0) {
      const size_t sub = (b * BlockPanels::kBlockQuads + kQuad) / kSubQuads;
      HWY_UNROLL(8)
      for (size_t v = 0; v < kWidth; ++v) {
        s[v] = records[v / kVecs].Scale(sub, v % kVecs);
        if constexpr (kTraits.has_mins()) {
          t[v] = records[v / kVecs].Min(sub, v % kVecs);
        } else {
          t[v] = s[v];  // is not read
        }
      }
    }
    VI quads[kWidth];
    HWY_UNROLL(8)
    for (size_t v = 0; v < kWidth; ++v) {
      quads[v] = QuadValues<kFormat, kQuad>(records[v / kVecs], b, v % kVecs);
    }
    const size_t k = b * BlockPanels::kBlockK + 4 * kQuad;
    TakeByte<kTraits.has_mins(), 0>(quads, s, t, k, sink);
    TakeByte<kTraits.has_mins(), 1>(quads, s, t, k + 1, sink);
    TakeByte<kTraits.has_mins(), 2>(quads, s, t, k + 2, sink);
    TakeByte<kTraits.has_mins(), 3>(quads, s, t, k + 3, sink);
    TakeQuads<kFormat, kQuad + 1>(records, b, s, t, sink);
  }
}

struct StoreWeights {
  HWY_INLINE void Take(size_t k, const VF (&w)[kVecs]) const {
    HWY_UNROLL(4)
    for (size_t v = 0; v < kVecs; ++v) {
      hn::StoreU(w[v], DF(), to->w[k] + v * kFloats);
    }
  }
  ExactRecord* HWY_RESTRICT to;
};

template <BlockFormat kFormat>
void DecodeExact(const uint8_t* from, size_t blocks, ExactRecord* to) {
  const PackedRecord<kFormat> records[1] = {PackedRecord<kFormat>(from)};
  StoreWeights store = {to};
  for (size_t b = 0; b < blocks; ++b) {
    VF s[kVecs], t[kVecs];
    TakeQuads<kFormat, 0>(records, b, s, t, store);
  }
}

// Multiplies rows of packed f32 by the weights that it takes.
template <size_t kRows, size_t kWidth>
struct SumProducts {
  HWY_INLINE void Take(size_t k, const VF (&w)[kWidth]) {
    HWY_UNROLL(4)
    for (size_t r = 0; r < kRows; ++r) {
      const uint32_t word = a[r * PackedRowPitch(1) + k];
      HWY_UNROLL(8)
      for (size_t v = 0; v < kWidth; ++v) {
        sums[r][v] = FmaSums::MulAdd(w[v], word, sums[r][v]);
      }
    }
  }
  const uint32_t* HWY_RESTRICT a;
  VF sums[kRows][kWidth];
};

template <BlockFormat kFormat, size_t kRows, size_t... kPanel>
HWY_INLINE void ExactTile(const TileArgs& args,
                          std::index_sequence<kPanel...>) {
  constexpr size_t kPanels = sizeof...(kPanel);
  constexpr size_t kWidth = kPanels * kVecs;
  const PackedRecord<kFormat> records[kPanels] = {
      PackedRecord<kFormat>(args.b + kPanel * args.panel_bytes)...};
  SumProducts<kRows, kWidth> products;
  products.a = args.a;
  ClearSums<DF>(products.sums);
  for (size_t b = 0; b < args.steps; ++b) {
    Fetch<kPanels>(args.prefetch[0], b);
    VF s[kWidth], t[kWidth];
    TakeQuads<kFormat, 0>(records, b, s, t, products);
  }
  HWY_UNROLL(4)
  for (size_t r = 0; r < kRows; ++r) {
    float* HWY_RESTRICT to =
        static_cast<float*>(args.sums) + r * args.sums_stride;
    HWY_UNROLL(8)
    for (size_t v = 0; v < kWidth; ++v) {
      float* HWY_RESTRICT at = to + v * kFloats;
      const auto old = args.add ? hn::LoadU(DF(), at) : hn::Zero(DF());
      hn::StoreU(hn::Add(old, products.sums[r][v]), DF(), at);
    }
  }
}

template <BlockFormat kFormat, size_t kRows, size_t kPanels>
void FusedExactTile(const TileArgs& args) {
  ExactTile<kFormat, kRows>(args, std::make_index_sequence<kPanels>());
}

// Panels of a fused tile, at most. A sum takes a multiply-add for each k, whose
// latency other sums must fill.
constexpr size_t kExactPanels = kVecs > 1 || kFewTiles ? 1 : 4;
// Rows of the largest fused tile. With more rows, DecodeExact writes each
// record once and the tiles of f32 multiply it (Q4_K, 4096 x 4096, 4 rows: 560
// us so, and 730 by tiles of four rows; AVX2 1010 and 1110. Zen 5, 2026). Where
// a line is four vectors, nothing stays in registers.
constexpr size_t kExactRows = kVecs > 2 ? 0 : 2;

template <BlockFormat kFormat>
struct ExactTiles {
  static constexpr size_t kMostRows = kExactRows;
  static constexpr bool Has(size_t /*rows*/, size_t panels) {
    return panels <= kExactPanels;
  }
  template <size_t kRows, size_t kPanels>
  static constexpr Tile kTile = &FusedExactTile<kFormat, kRows, kPanels>;
};

template <BlockFormat kFormat>
ExactBlockKernels MakeExactKernels() {
  ExactBlockKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.sums = TileSums::kAlike;
  kernels.fused = TableOf(kTilesOf<ExactTiles<kFormat>>);
  kernels.decode = &DecodeExact<kFormat>;
  return kernels;
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
