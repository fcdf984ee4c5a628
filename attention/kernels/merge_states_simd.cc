#include "quern/attention/kernels/merge_states_kernels.h"
#include "quern/attention/kernels/softmax_state.h"
#include "quern/core/dtype.h"
#include "quern/core/sets/avx3_zen4.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/kernels/merge_states_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After foreach_target.
#include "quern/attention/kernels/softmax_state-inl.h"
#include "quern/core/exp-inl.h"
#include "quern/quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// The larger part has weight 1, the other w = exp(-|a - b|); both over 1 + w.
void Weights(const float* a, const float* b, size_t heads,
             float* HWY_RESTRICT weight_a, float* HWY_RESTRICT weight_b,
             float* lse) {
  const hn::ScalableTag<float> df;
  const auto one = hn::Set(df, 1.0f);
  const auto minus_infinity = hn::Set(df, SoftmaxState().max);
  for (size_t h = 0; h < heads; h += hn::Lanes(df)) {
    const size_t n = HWY_MIN(hn::Lanes(df), heads - h);
    const auto lse_of = [&](const float* p) HWY_ATTR {
      const auto v = hn::LoadN(df, p, n);
      return hn::IfThenElse(hn::Eq(v, hn::Neg(minus_infinity)), minus_infinity,
                            v);
    };
    const auto x = lse_of(a + h);
    const auto y = lse_of(b + h);
    const auto x_above = hn::Ge(x, y);
    const auto most = hn::IfThenElse(x_above, x, y);
    const auto below = hn::Neg(hn::Abs(hn::Sub(x, y)));
    const auto w = Exp2OfNegative(df, hn::Mul(below, hn::Set(df, 1.44269504f)));
    const auto larger = hn::Div(one, hn::Add(one, w));
    const auto smaller = hn::Mul(w, larger);
    const auto none = hn::And(hn::Eq(x, minus_infinity), hn::Eq(y, x));
    hn::StoreN(
        hn::IfThenZeroElse(none, hn::IfThenElse(x_above, larger, smaller)), df,
        weight_a + h, n);
    hn::StoreN(
        hn::IfThenZeroElse(none, hn::IfThenElse(x_above, smaller, larger)), df,
        weight_b + h, n);
    if (lse == nullptr) continue;
    const auto sum = hn::Add(most, Log1pOfFraction(df, w));
    hn::StoreN(hn::IfThenElse(none, minus_infinity, sum), df, lse + h, n);
  }
}

template <typename T, typename Out>
void Merge(const void* a, float weight_a, const void* b, float weight_b,
           size_t count, void* out) {
  const hn::ScalableTag<float> df;
  const T* x = static_cast<const T*>(a);
  const T* y = static_cast<const T*>(b);
  Out* to = static_cast<Out*>(out);
  const size_t lanes = hn::Lanes(df);
  if (weight_a == 0.0f || weight_b == 0.0f) {
    const T* from = weight_a == 0.0f ? y : x;
    const bool none = weight_a == weight_b;
    for (size_t d = 0; d < count; d += lanes) {
      const size_t n = HWY_MIN(lanes, count - d);
      StoreNF32(none ? hn::Zero(df) : LoadNF32(df, from + d, n), df, to + d, n);
    }
    return;
  }
  const auto wx = hn::Set(df, weight_a);
  const auto wy = hn::Set(df, weight_b);
  size_t d = 0;
  for (; d + lanes <= count; d += lanes) {
    const auto theirs = hn::Mul(wy, LoadF32(df, y + d));
    StoreF32(hn::MulAdd(wx, LoadF32(df, x + d), theirs), df, to + d);
  }
  if (d == count) return;
  const size_t n = count - d;
  const auto theirs = hn::Mul(wy, LoadNF32(df, y + d, n));
  StoreNF32(hn::MulAdd(wx, LoadNF32(df, x + d, n), theirs), df, to + d, n);
}

template <typename T>
void SetMerge(DType out, MergeStatesKernels& kernels) {
  kernels.merge = out == DType::kF32    ? &Merge<T, float>
                  : out == DType::kBF16 ? &Merge<T, BFloat16>
                                        : &Merge<T, Float16>;
}

MergeStatesKernels GetKernels(DType dtype, DType out) {
  MergeStatesKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.weights = &Weights;
  if (dtype == DType::kF32) SetMerge<float>(out, kernels);
  if (dtype == DType::kBF16) SetMerge<BFloat16>(out, kernels);
  if (dtype == DType::kF16) SetMerge<Float16>(out, kernels);
  return kernels;
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
MergeStatesKernels GetMergeStatesKernels(DType dtype, DType out_dtype) {
  return HWY_DYNAMIC_DISPATCH(GetKernels)(dtype, out_dtype);
}
}  // namespace quern
#endif  // HWY_ONCE
