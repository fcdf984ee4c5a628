#include <cstddef>
#include <cstdint>

#include "quern/gemm/onednn/scaled_epilogue_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gemm/onednn/scaled_epilogue_simd.cc"
#include "hwy/foreach_target.h"  // must precede highway.h
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// x * scales + bias, of n <= Lanes(d) elements from i on.
template <class D, class V = hn::Vec<D>>
void Finish(D d, const ScaledEpilogueRow& row, size_t i, size_t n, V x,
            float* out) {
  const V scale =
      hn::Mul(hn::Set(d, row.a_scale), hn::LoadN(d, row.w_scales + i, n));
  const V y = row.bias == nullptr
                  ? hn::Mul(x, scale)
                  : hn::MulAdd(x, scale, hn::LoadN(d, row.bias + i, n));
  hn::StoreN(y, d, out + i, n);
}

// The sums of a * w, which fit i32 though those with offsets may not.
template <class DI>
hn::Vec<DI> Sums(DI di, const ScaledEpilogueRow& row, size_t i, size_t n) {
  const auto sums = hn::LoadN(di, row.sums + i, n);
  if (row.offsets == nullptr) return sums;
  return hn::Sub(sums, hn::LoadN(di, row.offsets + i, n));
}

void Row(const ScaledEpilogueRow& row, size_t n, float* out) {
  if (row.col_sums == nullptr) {
    const hn::ScalableTag<float> d;
    const hn::RebindToSigned<decltype(d)> di;
    const size_t lanes = hn::Lanes(d);
    for (size_t i = 0; i < n; i += lanes) {
      const size_t count = HWY_MIN(lanes, n - i);
      const auto x = hn::ConvertTo(d, Sums(di, row, i, count));
      Finish(d, row, i, count, x, out);
    }
    return;
  }
  // f64 holds both the sum and the product with the zero point exactly; i32
  // would wrap for zero points far outside the range of i8, which rows that are
  // far from zero have.
  const hn::ScalableTag<double> dd;
  const hn::Rebind<float, decltype(dd)> d;
  const hn::Rebind<int32_t, decltype(dd)> di;
  const size_t lanes = hn::Lanes(dd);
  const auto zero_point = hn::Set(dd, static_cast<double>(row.zero_point));
  for (size_t i = 0; i < n; i += lanes) {
    const size_t count = HWY_MIN(lanes, n - i);
    const auto sum = hn::PromoteTo(dd, Sums(di, row, i, count));
    const auto col_sum =
        hn::PromoteTo(dd, hn::LoadN(di, row.col_sums + i, count));
    const auto exact = hn::NegMulAdd(zero_point, col_sum, sum);
    Finish(d, row, i, count, hn::DemoteTo(d, exact), out);
  }
}

ScaledEpilogueKernels GetKernels() {
  ScaledEpilogueKernels kernels;
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.row = &Row;
  return kernels;
}

}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern {

HWY_EXPORT(GetKernels);

ScaledEpilogueKernels GetScaledEpilogueKernels() {
  return HWY_DYNAMIC_DISPATCH(GetKernels)();
}

}  // namespace quern
#endif
