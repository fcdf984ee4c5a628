#include "quern/core/sets/avx3_zen4.h"
#include "quern/ops/parallel/rank_sum_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/parallel/rank_sum_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// highway.h must follow foreach_target.h.
#include "hwy/highway.h"
#include "quern/quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
void Sum(const void* const* in, size_t ranks, void* out, size_t n) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  const auto* const* x = reinterpret_cast<const T* const*>(in);
  T* y = static_cast<T*>(out);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    auto sum = LoadF32(d, x[0] + i);
    for (size_t r = 1; r < ranks; ++r) {
      sum = hn::Add(sum, LoadF32(d, x[r] + i));
    }
    StoreF32(sum, d, y + i);
  }
  if (i == n) return;
  auto sum = LoadNF32(d, x[0] + i, n - i);
  for (size_t r = 1; r < ranks; ++r) {
    sum = hn::Add(sum, LoadNF32(d, x[r] + i, n - i));
  }
  StoreNF32(sum, d, y + i, n - i);
}

RankSumKernels GetKernels() {
  return {hwy::TargetName(HWY_TARGET), &Sum<float>, &Sum<BFloat16>,
          &Sum<Float16>};
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern {
namespace {
HWY_EXPORT(GetKernels);
}  // namespace
RankSumKernels GetRankSumKernels() {
  return HWY_DYNAMIC_DISPATCH(GetKernels)();
}
}  // namespace quern
#endif  // HWY_ONCE
