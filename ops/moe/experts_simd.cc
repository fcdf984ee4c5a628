#include <cstddef>

#include "quern/core/dtype.h"
#include "quern/core/float_type.h"
#include "quern/core/sets/avx3_zen4.h"
#include "quern/ops/moe/experts_kernels.h"

// Compiled once per instruction set: foreach_target.h re-includes this file.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/moe/experts_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "quern/quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_HAVE_SCALABLE
using DF = hn::FixedTag<float, 4>;
#else
using DF = hn::CappedTag<float, 16>;
#endif
constexpr size_t kFloats = HWY_MAX_LANES_D(DF);

// kVecs vectors of sums, so that additions of one do not wait for each other.
// add may be out: no restrict.
template <typename T, size_t kVecs>
HWY_INLINE void CombineVecs(const CombineArgs& args, size_t i) {
  const DF df;
  hn::Vec<DF> sum[kVecs];
  HWY_UNROLL(4)
  for (size_t v = 0; v < kVecs; ++v) sum[v] = hn::Zero(df);
  for (size_t j = 0; j < args.count; ++j) {
    const float* row = args.rows[j] + i;
    const auto weight = hn::Set(df, args.weights[j]);
    HWY_UNROLL(4)
    for (size_t v = 0; v < kVecs; ++v) {
      sum[v] = hn::MulAdd(weight, hn::LoadU(df, row + v * kFloats), sum[v]);
    }
  }
  const T* add = static_cast<const T*>(args.add);
  T* out = static_cast<T*>(args.out);
  HWY_UNROLL(4)
  for (size_t v = 0; v < kVecs; ++v) {
    const size_t at = i + v * kFloats;
    if (add != nullptr) sum[v] = hn::Add(sum[v], LoadF32(df, add + at));
    StoreF32(sum[v], df, out + at);
  }
}

template <typename T>
void Combine(const CombineArgs& args) {
  const DF df;
  size_t i = 0;
  for (; i + 4 * kFloats <= args.n; i += 4 * kFloats)
    CombineVecs<T, 4>(args, i);
  for (; i + kFloats <= args.n; i += kFloats) CombineVecs<T, 1>(args, i);
  if (i == args.n) return;
  const size_t left = args.n - i;
  auto sum = hn::Zero(df);
  for (size_t j = 0; j < args.count; ++j) {
    sum = hn::MulAdd(hn::Set(df, args.weights[j]),
                     hn::LoadN(df, args.rows[j] + i, left), sum);
  }
  if (args.add != nullptr) {
    sum = hn::Add(sum, LoadNF32(df, static_cast<const T*>(args.add) + i, left));
  }
  StoreNF32(sum, df, static_cast<T*>(args.out) + i, left);
}

template <typename T>
void Scale(float weight, const void* from, void* to, size_t n) {
  const DF df;
  const auto w = hn::Set(df, weight);
  const T* HWY_RESTRICT x = static_cast<const T*>(from);
  T* HWY_RESTRICT y = static_cast<T*>(to);
  size_t i = 0;
  for (; i + kFloats <= n; i += kFloats) {
    StoreF32(hn::Mul(w, LoadF32(df, x + i)), df, y + i);
  }
  if (i == n) return;
  StoreNF32(hn::Mul(w, LoadNF32(df, x + i, n - i)), df, y + i, n - i);
}

ExpertsKernels GetKernels(DType x, DType out) {
  ExpertsKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.combine =
      WithFloatType(out, [](auto t) { return &Combine<decltype(t)>; });
  kernels.scale = WithFloatType(x, [](auto t) { return &Scale<decltype(t)>; });
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
ExpertsKernels GetExpertsKernels(DType x, DType out) {
  return HWY_DYNAMIC_DISPATCH(GetKernels)(x, out);
}
}  // namespace quern
#endif  // HWY_ONCE
