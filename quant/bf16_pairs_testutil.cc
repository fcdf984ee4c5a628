#include "quern/quant/bf16_pairs_testutil.h"

// Compiled once per instruction set: foreach_target.h re-includes this file.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "quant/bf16_pairs_testutil.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "quern/quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

template <bool kNumbers>
void EncodePairs(const float* even, const float* odd, size_t n,
                 uint16_t* codes) {
  const hn::ScalableTag<float> df;
  const hn::Repartition<uint16_t, decltype(df)> dc;
  for (size_t i = 0; i < n; i += hn::Lanes(df)) {
    const auto a = hn::LoadU(df, even + i);
    const auto b = hn::LoadU(df, odd + i);
    if constexpr (kNumbers) {
      hn::StoreU(EncodeBF16NumberPairs(df, a, b), dc, codes + 2 * i);
    } else {
      hn::StoreU(EncodeBF16Pairs(df, a, b), dc, codes + 2 * i);
    }
  }
}

BF16PairEncoders GetEncoders() {
  return {hwy::TargetName(HWY_TARGET), &EncodePairs<false>, &EncodePairs<true>};
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern {
namespace {
HWY_EXPORT(GetEncoders);
}  // namespace
BF16PairEncoders GetBF16PairEncoders() {
  return HWY_DYNAMIC_DISPATCH(GetEncoders)();
}
}  // namespace quern
#endif  // HWY_ONCE
