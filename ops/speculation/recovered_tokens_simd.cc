#include "quern/core/sets/avx3.h"
#include "quern/ops/speculation/recovered_tokens_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/speculation/recovered_tokens_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// highway.h must follow foreach_target.h.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DI = hn::RebindToSigned<DF>;
using VF = hn::Vec<DF>;
using VI = hn::Vec<DI>;

// Each lane keeps its own largest product and the first place of it.
// Comparisons are strict, so a lane keeps the lowest of equal ones, and a NaN
// never wins.
template <bool kDifference>
HWY_INLINE BestToken Best(const float* HWY_RESTRICT p,
                          const float* HWY_RESTRICT q,
                          const float* HWY_RESTRICT inv_q, int64_t begin,
                          int64_t end, BestToken best) {
  const DF d;
  const DI di;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const VF zero = hn::Zero(d);
  const VF start = hn::Set(d, best.value);
  VF most = start;
  VI places = hn::Set(di, -1);
  VI here = hn::Iota(di, static_cast<int32_t>(begin));
  const VI step = hn::Set(di, static_cast<int32_t>(lanes));
  const auto product = [&](VF a, VF b, VF scale) HWY_ATTR {
    if (kDifference) {
      a = hn::Sub(a, b);
      a = hn::IfThenElseZero(hn::Gt(a, zero), a);
    }
    return hn::Mul(a, scale);
  };
  int64_t v = begin;
  for (; v + lanes <= end; v += lanes) {
    const VF w =
        product(hn::LoadU(d, p + v), kDifference ? hn::LoadU(d, q + v) : zero,
                hn::LoadU(d, inv_q + v));
    const auto wins = hn::Gt(w, most);
    most = hn::IfThenElse(wins, w, most);
    places = hn::IfThenElse(hn::RebindMask(di, wins), here, places);
    here = hn::Add(here, step);
  }
  if (v < end) {
    const auto rest = static_cast<size_t>(end - v);
    const VF w = product(hn::LoadN(d, p + v, rest),
                         kDifference ? hn::LoadN(d, q + v, rest) : zero,
                         hn::LoadN(d, inv_q + v, rest));
    const auto wins = hn::And(hn::FirstN(d, rest), hn::Gt(w, most));
    most = hn::IfThenElse(wins, w, most);
    places = hn::IfThenElse(hn::RebindMask(di, wins), here, places);
  }
  const float largest = hn::ReduceMax(d, most);
  if (!(largest > best.value)) return best;
  // The lowest place among lanes that have the largest product.
  const auto has = hn::Eq(most, hn::Set(d, largest));
  const VI last = hn::Set(di, 0x7fffffff);
  best.value = largest;
  best.token =
      hn::ReduceMin(di, hn::IfThenElse(hn::RebindMask(di, has), places, last));
  return best;
}

BestToken Difference(const float* p, const float* q, const float* inv_q,
                     int64_t begin, int64_t end, BestToken best) {
  return Best<true>(p, q, inv_q, begin, end, best);
}
BestToken Probability(const float* p, const float* inv_q, int64_t begin,
                      int64_t end, BestToken best) {
  return Best<false>(p, p, inv_q, begin, end, best);
}

RecoveredTokensKernels GetKernels() {
  return {hwy::TargetName(HWY_TARGET), &Difference, &Probability};
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
RecoveredTokensKernels GetRecoveredTokensKernels() {
  return HWY_DYNAMIC_DISPATCH(GetKernels)();
}
}  // namespace quern
#endif  // HWY_ONCE
