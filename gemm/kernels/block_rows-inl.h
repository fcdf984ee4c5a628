// Quantises rows as BlockKernels::pack_row says, once per instruction set.

// clang-format off
#if defined(QUERN_GEMM_KERNELS_BLOCK_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_GEMM_KERNELS_BLOCK_ROWS_INL_H_
#undef QUERN_GEMM_KERNELS_BLOCK_ROWS_INL_H_
#else
#define QUERN_GEMM_KERNELS_BLOCK_ROWS_INL_H_
#endif
// clang-format on

#include <cstddef>
#include <cstdint>

#include "hwy/base.h"
#include "hwy/highway.h"
#include "quern/core/quad_dot-inl.h"
#include "quern/gemm/kernels/block_dot-inl.h"
#include "quern/gemm/weights/block_traits.h"
#include "quern/packing/block_panels.h"
#include "quern/quant/convert-inl.h"
#include "quern/quant/rounded_product-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Sums of 16 codes in pairs: lane 2 i has those of k = 4 i and 4 i + 1, lane
// 2 i + 1 the others of quad i.
using DPairs = hn::FixedTag<int16_t, 8>;
HWY_INLINE hn::Vec<DPairs> PairSums(const int8_t* HWY_RESTRICT codes) {
  const hn::Repartition<int8_t, DPairs> ds;
  const hn::Repartition<uint8_t, DPairs> du;
  return hn::SatWidenMulPairwiseAdd(DPairs(), hn::Set(du, uint8_t{1}),
                                    hn::LoadU(ds, codes));
}

// The term of a sub-block whose pairs add up to `pairs`.
HWY_INLINE uint32_t TermOf(hn::Vec<DPairs> pairs, const BlockTerms& terms,
                           float scale) {
  const DPairs d;
  const hn::Repartition<int32_t, DPairs> di;
  const auto factor = static_cast<int16_t>(terms.mins ? 1 : -terms.zero);
  if (terms.mins || QUERN_HAS_VPDPBUSD) {
    const int32_t sum = hn::ReduceSum(
        di, hn::WidenMulPairwiseAdd(di, pairs, hn::Set(d, factor)));
    return terms.mins
               ? hwy::BitCastScalar<uint32_t>(scale * static_cast<float>(sum))
               : static_cast<uint32_t>(sum);
  }
  // Two sums of 16 bits: at most half a sub-block of products, which fit.
  auto sums = hn::Mul(pairs, hn::Set(d, factor));
  sums = hn::Add(sums, hn::BitCast(d, hn::Shuffle1032(hn::BitCast(di, sums))));
  sums = hn::Add(sums, hn::BitCast(d, hn::Shuffle2301(hn::BitCast(di, sums))));
  return static_cast<uint32_t>(hn::GetLane(hn::BitCast(di, sums)));
}

// Quantises 32 elements to `codes` and returns their scale.
template <typename T>
HWY_INLINE float QuantizeCodes(const T* HWY_RESTRICT x,
                               int8_t* HWY_RESTRICT codes) {
  const DF df;
  const DI di;
  const hn::Rebind<uint8_t, DF> du8;
  constexpr size_t kBlockVecs = BlockPanels::kBlockK / kFloats;
  VF v[kBlockVecs];
  auto most = hn::Zero(di);  // of the bits of |x|, which grow with it
  HWY_UNROLL(8)
  for (size_t i = 0; i < kBlockVecs; ++i) {
    v[i] = LoadF32(df, x + i * kFloats);
    most = hn::Max(most, hn::BitCast(di, hn::Abs(v[i])));
  }
  const int32_t max_bits = hn::ReduceMax(di, most);
  constexpr int32_t kInfinity = 0x7F800000;
  const float max = hwy::BitCastScalar<float>(max_bits);
  float scale = max_bits == 0 ? 1.0f : HWY_MAX(max / 127.0f, 0x1p-125f);
  float inverse = 1.0f / scale;
  if (HWY_UNLIKELY(max_bits >= kInfinity)) {
    scale = hwy::BitCastScalar<float>(0x7FC00000);
    inverse = 0.0f;
    HWY_UNROLL(8)
    for (size_t i = 0; i < kBlockVecs; ++i) v[i] = hn::Zero(df);
  }
  HWY_UNROLL(8)
  for (size_t i = 0; i < kBlockVecs; ++i) {
    const auto rounded = RoundedProduct(df, v[i], hn::Set(df, inverse));
    const auto bytes = hn::TruncateTo(du8, hn::BitCast(DU(), rounded));
    hn::StoreU(bytes, du8, reinterpret_cast<uint8_t*>(codes) + i * kFloats);
  }
  return scale;
}

// Quantises 32 elements as block b of `to`.
template <typename T>
HWY_INLINE void QuantizeBlock(const T* HWY_RESTRICT x, const BlockTerms& terms,
                              size_t b, BlockRow* HWY_RESTRICT to) {
  int8_t* HWY_RESTRICT codes = to->codes + b * BlockPanels::kBlockK;
  const float scale = QuantizeCodes(x, codes);
  to->scales[b] = scale;
  if (!terms.mins && terms.zero == 0) return;
  const auto first = PairSums(codes), second = PairSums(codes + 16);
  if (terms.sub_block == BlockPanels::kBlockK) {
    to->terms[b] = TermOf(hn::Add(first, second), terms, scale);
  } else {
    to->terms[2 * b] = TermOf(first, terms, scale);
    to->terms[2 * b + 1] = TermOf(second, terms, scale);
  }
}

template <typename T>
HWY_INLINE void QuantizeBlock(const T* HWY_RESTRICT x,
                              const BlockTerms& /*terms*/, size_t b,
                              WordRow* HWY_RESTRICT to) {
  alignas(16) int8_t codes[BlockPanels::kBlockK];
  to->scales[b] = QuantizeCodes(x, codes);
  const hn::FixedTag<int16_t, 8> dw;
  const hn::Repartition<int32_t, decltype(dw)> dq;
  int16_t* HWY_RESTRICT words = to->codes + b * BlockPanels::kBlockK;
  for (size_t i = 0; i < BlockPanels::kBlockK; i += 16) {
    const auto quads =
        hn::Load(dw, reinterpret_cast<const int16_t*>(codes + i));
    const auto even =
        hn::BitCast(dq, hn::ShiftRight<8>(hn::ShiftLeft<8>(quads)));
    const auto odd = hn::BitCast(dq, hn::ShiftRight<8>(quads));
    hn::StoreU(hn::BitCast(dw, hn::InterleaveLower(dq, even, odd)), dw,
               words + i);
    hn::StoreU(hn::BitCast(dw, hn::InterleaveUpper(dq, even, odd)), dw,
               words + i + 8);
  }
}

template <typename T, class Row>
void PackBlockRow(const void* a, size_t k, const BlockTerms& terms,
                  uint32_t* to) {
  const T* HWY_RESTRICT x = static_cast<const T*>(a);
  auto* HWY_RESTRICT row = reinterpret_cast<Row*>(to);
  const size_t blocks = k / BlockPanels::kBlockK;
  for (size_t b = 0; b < blocks; ++b) {
    QuantizeBlock(x + b * BlockPanels::kBlockK, terms, b, row);
  }
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
