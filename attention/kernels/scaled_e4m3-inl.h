// A cache of e4m3 with AVX2, where a code times 2^-8 takes half the
// instructions to become f32 that the code itself takes: as an f16 whose
// exponent has an upper 0, every code but NaN is that.
//
// Logits are multiplied by 2^8 and so are weights, whose least ones times 2^-8
// would be denormal. The results have the bits of FmaBytes<Float8E4M3> while
// nothing overflows, no sum loses bits to denormals, and no code is NaN. Serves
// says whether that holds.

// Per-target include guard.
#if defined(QUERN_ATTENTION_KERNELS_SCALED_E4M3_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_ATTENTION_KERNELS_SCALED_E4M3_INL_H_
#undef QUERN_ATTENTION_KERNELS_SCALED_E4M3_INL_H_
#else
#define QUERN_ATTENTION_KERNELS_SCALED_E4M3_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "quern/attention/kernels/attend_tiles-inl.h"
#include "quern/attention/kernels/line_arithmetic-inl.h"
#include "quern/attention/kernels/paged_attention_kernels.h"
#include "quern/core/dtype.h"
#include "quern/quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#undef QUERN_ATTENTION_SCALED_E4M3
#if QUERN_NATIVE_F16 && HWY_TARGET > HWY_AVX3
#define QUERN_ATTENTION_SCALED_E4M3 1

// Whether every one of `count` numbers is 0, or within [2^-60, 2^60) in
// magnitude. Products of such numbers with codes, and sums of 2^20 products,
// are then far from overflow and multiples of 2^-100.
HWY_INLINE bool AreModerate(const float* HWY_RESTRICT from, size_t count) {
  const LineF32 df;
  const LineU32 du;
  const auto least = hn::Set(du, uint32_t{127 - 60} << 23);
  const auto range = hn::Set(du, uint32_t{2 * 60} << 23);
  auto bad = hn::MaskFalse(du);
  for (size_t i = 0; i < count; i += kVecLanes) {
    const auto x = hn::LoadN(df, from + i, HWY_MIN(kVecLanes, count - i));
    const auto abs = hn::BitCast(du, hn::Abs(x));
    bad = hn::Or(bad, hn::AndNot(hn::Eq(abs, hn::Zero(du)),
                                 hn::Ge(hn::Sub(abs, least), range)));
  }
  return hn::AllFalse(du, bad);
}

// Queries and scales of values are moderate.
HWY_INLINE bool ScalesExactly(const ChunkArgs& c) {
  for (size_t row = 0; row < c.rows; ++row) {
    const auto* q = reinterpret_cast<const float*>(c.q + row * c.q_stride);
    if (!AreModerate(q, c.head_dim)) return false;
  }
  return c.v_scales == nullptr ||
         AreModerate(c.v_scales, kChunkGroups * kGroupTokens);
}

struct ScaledE4M3 : InPlace<FmaSums>, F32Weights {
  static constexpr size_t kSub = 2;
  static constexpr size_t kWordElements = 2;
  static constexpr size_t kWordBytes = 2;
  using DW = hn::Rebind<uint16_t, LineF32>;

  static bool Serves(const ChunkArgs& c) {
    return ScalesExactly(c) && !AnyNaN(c);
  }

  template <size_t kI>
  static HWY_INLINE VF32 LoadB(const uint8_t* HWY_RESTRICT line) {
    return Widen<kI>(hn::LoadU(DW(), reinterpret_cast<const uint16_t*>(line)));
  }
  template <size_t kI>
  static HWY_INLINE VF32 LoadNB(const uint8_t* HWY_RESTRICT line, size_t n) {
    return Widen<kI>(
        hn::LoadN(DW(), reinterpret_cast<const uint16_t*>(line), n));
  }
  static HWY_INLINE VF32 Logit(VF32 sum) {
    return hn::Mul(sum, hn::Set(LineF32(), 256.0f));
  }
  static HWY_INLINE void StoreWeights(VF32 p, uint32_t* row, size_t token) {
    F32Weights::StoreWeights(Logit(p), row, token);
  }

 private:
  template <size_t kI>
  static HWY_INLINE VF32 Widen(hn::Vec<DW> words) {
    const DW dw;
    const hn::RebindToSigned<DW> ds;
    const hn::Rebind<hwy::float16_t, LineF32> dh;
    const auto upper = kI == 0 ? hn::ShiftLeft<8>(words) : words;
    const auto moved = hn::ShiftRight<1>(hn::BitCast(ds, upper));
    const auto f16 =
        hn::And(hn::BitCast(dw, moved), hn::Set(dw, uint16_t{0xBF80}));
    return hn::PromoteTo(LineF32(), hn::BitCast(dh, f16));
  }

  // The largest of `count` codes without their signs, times 2.
  static HWY_INLINE hn::Vec<hn::ScalableTag<uint8_t>> Most(
      const uint8_t* HWY_RESTRICT codes, size_t count,
      hn::Vec<hn::ScalableTag<uint8_t>> most) {
    const hn::ScalableTag<uint8_t> d;
    const size_t lanes = hn::Lanes(d);
    size_t i = 0;
    for (; i + lanes <= count; i += lanes) {
      const auto x = hn::LoadU(d, codes + i);
      most = hn::Max(most, hn::Add(x, x));
    }
    const auto x = hn::LoadN(d, codes + i, count - i);
    return hn::Max(most, hn::Add(x, x));
  }
  // A code of NaN among those that rows see.
  static HWY_INLINE bool AnyNaN(const ChunkArgs& c) {
    const hn::ScalableTag<uint8_t> d;
    const TokenRange groups = GroupsOf(c.seen, c.rows);
    auto most = hn::Zero(d);
    for (size_t g = groups.begin; g < groups.end; ++g) {
      most = Most(c.k[g], kGroupTokens * ((c.head_dim + 1) / 2 * 2), most);
      most = Most(c.v[g], kGroupTokens * c.v_head_dim, most);
    }
    return !hn::AllFalse(d, hn::Eq(most, hn::Set(d, uint8_t{0xFE})));
  }
};

#else
#define QUERN_ATTENTION_SCALED_E4M3 0
#endif

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
