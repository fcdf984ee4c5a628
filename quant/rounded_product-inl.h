// A product that is rounded to an integer once, for kernels that quantise.

// clang-format off
#if defined(QUERN_QUANT_ROUNDED_PRODUCT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_QUANT_ROUNDED_PRODUCT_INL_H_
#undef QUERN_QUANT_ROUNDED_PRODUCT_INL_H_
#else
#define QUERN_QUANT_ROUNDED_PRODUCT_INL_H_
#endif
// clang-format on

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// rint(v * factor), the product not rounded before, in the lower 16 bits of
// each lane; the upper ones are unspecified. |v * factor| < 2^15.
template <class DF, class DI = hn::RebindToSigned<DF>>
HWY_INLINE hn::Vec<DI> RoundedProduct(DF df, hn::Vec<DF> v,
                                      hn::Vec<DF> factor) {
  const DI di;
  // Added to a number whose unit in the last place is 1, and whose mantissa is
  // 0 in the lower bits, a small one is rounded to an integer there.
#if HWY_NATIVE_FMA
  return hn::BitCast(di, hn::MulAdd(v, factor, hn::Set(df, 0x1.8p23f)));
#else
  // The product of two f32 is exact in double.
  const hn::RepartitionToWide<DF> dd;
  const auto unit = hn::Set(dd, 0x1.8p52);
  const auto lower = hn::Add(
      hn::Mul(hn::PromoteLowerTo(dd, v), hn::PromoteLowerTo(dd, factor)), unit);
  const auto upper = hn::Add(
      hn::Mul(hn::PromoteUpperTo(dd, v), hn::PromoteUpperTo(dd, factor)), unit);
  return hn::ConcatEven(di, hn::BitCast(di, upper), hn::BitCast(di, lower));
#endif
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
